"""An owner whose lease has lapsed commits while others move its record."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from flask import request

from flask_idempotency import Resolution, StoredResponse

from .contest import TIMEOUT, Answer, account, owner_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from flask_idempotency import RecordView
    from tests.shop import Shop

    from .contest import Owner

T = TypeVar("T")

#: Races of one round.
RACES = 2
#: Of so many races each side wins some.
MANY = 100
#: Where the owner is when the others start: before its first statement, which is the
#: only chance of a rival on SQLite, and right before its COMMIT.
PLACES = ("view", "commit")
SETTLED = StoredResponse(code=201, body=b'{"by":"operator"}\n')
RESOLUTION = Resolution(ending=SETTLED, by="operator", reason="seen")


def rival_view(shop: Shop, **options: Any) -> None:
    """Serve the owner's route by a view that names its account after a rival."""

    def view() -> Any:
        shop.add(account(request.headers["Idempotency-Key"], "rival"))
        return {"by": "rival"}, 201

    shop.view(view, **options)


def race(owner: Owner, *rivals: Callable[[], T]) -> tuple[Answer, list[T]]:
    """Let the owner and its rivals start at once, and wait for all of them."""

    def run(rival: Callable[[], T]) -> T:
        owner.meet()
        return rival()

    owner.wake()
    with ThreadPoolExecutor(len(rivals)) as pool:
        running = [pool.submit(run, rival) for rival in rivals]
        results = [rival.result(TIMEOUT) for rival in running]
    return owner.answer(), results


def effects(shop: Shop, key: str) -> list[str]:
    """Return who has an account under a key."""
    names = (name.split() for name in shop.accounts())
    return [who for of, who in names if of == key]


def settled_answer(shop: Shop, key: str, answers: list[Answer]) -> str:
    """
    Check what all clients got, and return whose answer that is.

    Whoever was told of a success was told of the same one, at most one of them first
    hand, and the next duplicate is told of it, too.
    """
    last = Answer.of(shop.post(key=key))
    told = [answer for answer in (*answers, last) if answer.status == 201]
    assert {answer.status for answer in answers} <= {201, 409, 503}
    assert last.status == 201
    assert {answer.data for answer in told} == {last.data}
    assert sum(not answer.replayed for answer in told) <= 1
    return last.data.decode().split('"')[3]


def check_that_it_was_a_race(winners: Counter[str]) -> None:
    """Check that not always the same one wins, which would prove nothing."""
    assert winners.total() < MANY or len(winners) > 1, winners


def test_take_over(shop: Shop, rounds: int) -> None:
    """Of owner and successor one takes effect, and both tell of that one."""
    rival_view(shop)
    winners: Counter[str] = Counter()
    with owner_of(shop.database, rivals=1) as owner:
        for number in range(rounds * RACES):
            key = f"k{number}"
            owner.start(key, place=PLACES[number % 2])
            shop.lapse(key)
            if number % 3 == 0:
                shop.outlive(key)
            late, [answer] = race(owner, lambda: Answer.of(shop.post(key=key)))  # noqa: B023 - ends in this round
            winner = settled_answer(shop, key, [late, answer])
            assert effects(shop, key) == [winner]
            winners[winner] += 1
    check_that_it_was_a_race(winners)


def test_end_of_the_key(shop: Shop, rounds: int) -> None:
    """Expiry, purge and a new request race the owner: one effect per operation."""
    rival_view(shop)

    def clean_up() -> Answer | None:
        with shop.app.app_context():
            store = shop.idempotency.store
            store.expire(limit=10)
            store.purge(limit=10, older_than_seconds=0)
        return None

    winners: Counter[str] = Counter()
    with owner_of(shop.database, rivals=3) as owner:
        for number in range(rounds * RACES):
            key = f"k{number}"
            owner.start(key, place=PLACES[number % 2])
            shop.lapse(key)
            shop.outlive(key)

            def ask(key: str = key) -> Answer | None:
                return Answer.of(shop.post(key=key))

            late, others = race(owner, clean_up, ask, clean_up)
            answers = [answer for answer in (late, *others) if answer]
            winner = settled_answer(shop, key, answers)
            assert effects(shop, key) == [winner]
            winners[winner] += 1
    check_that_it_was_a_race(winners)


def test_unknown_outcome(shop: Shop, rounds: int) -> None:
    """Recovery, operator, expiry and the waking owner: one of them has the say."""

    def recover(_record: RecordView) -> Any:
        return {"by": "recovery"}, 201

    rival_view(shop, recover=recover)

    def resolve(key: str) -> bool:
        with shop.app.app_context():
            store = shop.idempotency.store
            return store.resolve(shop.scope(key), RESOLUTION) is not None

    def clean_up() -> bool:
        with shop.app.app_context():
            store = shop.idempotency.store
            gone = store.expire(limit=10) + store.purge(limit=10, older_than_seconds=0)
            assert gone == 0
        return False

    winners: Counter[str] = Counter()
    with owner_of(shop.database, rivals=4) as owner:
        for number in range(rounds * RACES):
            key = f"k{number}"
            owner.start(key, place=PLACES[number % 2], part="yes")
            shop.lapse(key)
            if number % 3 == 0:
                shop.outlive(key)

            def ask(key: str = key) -> Answer | bool:
                return Answer.of(shop.post(key=key))

            late, others = race(
                owner,
                lambda: resolve(key),  # noqa: B023 - ends in this round
                ask,
                clean_up,
                ask,
            )
            answers = [late, *(other for other in others if isinstance(other, Answer))]
            winner = settled_answer(shop, key, answers)
            assert (winner == "operator") is others[0]
            own = ["owner"] if winner == "owner" else []
            assert effects(shop, key) == ["part", *own]
            winners[winner] += 1
    check_that_it_was_a_race(winners)
