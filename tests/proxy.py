"""A network between an application and its database that can fall silent."""

from __future__ import annotations

import socket
import threading
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import make_url

from .databases import Database

if TYPE_CHECKING:
    from collections.abc import Callable

    from .shop import Shop

T = TypeVar("T")

_DEFAULT_PORTS = {"postgresql": 5432, "mariadb": 3306}


class Proxy:
    """
    Forwards TCP connections to a database server, until it is frozen.

    While it is frozen, connections are accepted and nothing on them is forwarded or
    closed. Those that saw the frost stay silent for ever, as when a firewall forgot
    them: who thaws the proxy has to connect anew.
    """

    def __init__(self, database: Database) -> None:
        url = make_url(database.url)
        port = url.port or _DEFAULT_PORTS[database.name]
        self._server = (url.host or "127.0.0.1", port)
        self._lock = threading.Lock()
        self._frozen = False
        self._break_at: tuple[bytes, bool, bool] | None = None
        #: How often somebody spoke to the server who had its last answer.
        self.trips = 0
        self._clients: set[socket.socket] = set()
        self._awaiting: set[socket.socket] = set()
        #: The other end of each socket; None where nothing is forwarded any more.
        self._peers: dict[socket.socket, socket.socket | None] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._end, self._ended = socket.socketpair()
        self._selector = DefaultSelector()
        self._selector.register(self._listener, EVENT_READ)
        self._selector.register(self._ended, EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        #: The database as it is reached through the proxy.
        self.database = Database(
            database.name,
            url.set(
                host="127.0.0.1", port=self._listener.getsockname()[1]
            ).render_as_string(hide_password=False),
        )

    def freeze(self) -> None:
        """Fall silent on all connections, those that are open and those to come."""
        with self._lock:
            self._frozen = True
            self._peers = dict.fromkeys(self._peers)

    def cut(self) -> None:
        """Break all connections that are open, for both ends."""
        with self._lock:
            for opened in list(self._peers):
                self._drop(opened)

    def break_at(self, word: bytes, *, delivered: bool, noticed: bool) -> None:
        """
        Break the connection on which something is said next.

        Args:
            word: What the client says.
            delivered: The server still hears it.
            noticed: The server learns that the client is gone.
        """
        with self._lock:
            self._break_at = word, delivered, noticed

    def thaw(self) -> None:
        """Forward the connections that are made from now on."""
        with self._lock:
            self._frozen = False

    def close(self) -> None:
        """Close every connection."""
        self._end.close()
        self._thread.join()
        self._selector.close()
        for opened in (self._ended, self._listener, *self._peers):
            opened.close()

    def _serve(self) -> None:
        while True:
            for key, _events in self._selector.select():
                if key.fileobj is self._ended:
                    return
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        client, _address = self._listener.accept()
        self._add(client, None)
        if not self._frozen:
            server = socket.create_connection(self._server)
            self._add(server, client)
            self._peers[client] = server
            self._clients.add(client)

    def _add(self, opened: socket.socket, peer: socket.socket | None) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[opened] = peer
        self._selector.register(opened, EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        if source not in self._peers:
            return  # closed together with its peer, in the same round
        peer = self._peers[source]
        try:
            data = source.recv(65536)
            if self._breaks(source, peer, data):
                return
            if data and peer is not None:
                self._count(source, peer)
                peer.sendall(data)
        except OSError:  # an end was reset
            data = b""
        if not data:
            self._drop(source)
            if peer is not None:
                self._drop(peer)

    def _breaks(
        self, source: socket.socket, peer: socket.socket | None, data: bytes
    ) -> bool:
        if self._break_at is None or peer is None or self._break_at[0] not in data:
            return False
        _word, delivered, noticed = self._break_at
        self._break_at = None
        if delivered:
            peer.sendall(data)
        self._drop(source)
        if noticed and not delivered:
            self._drop(peer)
        else:
            self._peers[peer] = None  # its answer goes nowhere
        return True

    def _count(self, source: socket.socket, peer: socket.socket) -> None:
        if source not in self._clients:
            self._awaiting.discard(peer)
        elif source not in self._awaiting:
            self._awaiting.add(source)
            self.trips += 1

    def _drop(self, closing: socket.socket) -> None:
        del self._peers[closing]
        self._selector.unregister(closing)
        closing.close()


def reconnect(shop: Shop) -> None:
    """Drop the application's own connections, which are its own to bound."""
    with shop.app.app_context():
        shop.db.engine.dispose()


def disconnect(shop: Shop) -> None:
    """Drop every connection, also the store's."""
    reconnect(shop)
    with shop.app.app_context():
        shop.idempotency.store.close()


def in_time(function: Callable[[], T], seconds: float = 30) -> T:
    """Return what `function` returns, and fail if it takes longer than `seconds`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the waiter
            errors.append(error)

    # A daemon, so that what hangs does not keep the process from its end.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {seconds} seconds"
    if errors:
        raise errors[0]
    return results[0]
