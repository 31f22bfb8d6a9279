"""The queue as a pure object: groups, tasks, leases, waits and bounds, without I/O or a clock."""

from offbeat.queue_service.core.core import QueueCore
from offbeat.queue_service.core.records import (
    CapacityGrant,
    ColumnSpec,
    Lease,
    LostGroup,
    PutReceipt,
    QueueLimits,
    Schema,
    Stats,
    Where,
)
from offbeat.queue_service.core.snapshot import QueueSnapshot

__all__ = [
    "CapacityGrant",
    "ColumnSpec",
    "Lease",
    "LostGroup",
    "PutReceipt",
    "QueueCore",
    "QueueLimits",
    "QueueSnapshot",
    "Schema",
    "Stats",
    "Where",
]
