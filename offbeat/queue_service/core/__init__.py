"""The queue as a pure object: groups, tasks, leases, waits and bounds, without I/O or a clock."""

from offbeat.queue_service.core.core import QueueCore
from offbeat.queue_service.core.records import (
    ColumnSpec,
    Lease,
    Limits,
    LostGroup,
    Receipt,
    Room,
    Schema,
    Stats,
    Where,
)
from offbeat.queue_service.core.snapshot import Snapshot

__all__ = [
    "ColumnSpec",
    "Lease",
    "Limits",
    "LostGroup",
    "QueueCore",
    "Receipt",
    "Room",
    "Schema",
    "Snapshot",
    "Stats",
    "Where",
]
