"""Messages that are written with the business rows and published after the commit."""

from __future__ import annotations

from .deliveries import Deliveries
from .dispatcher import Dispatcher, Publisher, Report
from .models import Batch, Delivery, DeliveryStats, DeliveryView

__all__ = [
    "Batch",
    "Deliveries",
    "Delivery",
    "DeliveryStats",
    "DeliveryView",
    "Dispatcher",
    "Publisher",
    "Report",
]
