"""State of a queue as plain data, for a file and a new process."""

from collections.abc import Sequence

import msgspec

from offbeat.queue_service.core.group import GroupTombstone, StoredGroup
from offbeat.queue_service.core.partition import Partition
from offbeat.queue_service.core.records import LostGroup, PutReceipt, Schema


class PartState(msgspec.Struct, frozen=True, array_like=True):
    """One payload: its columns as bits in the schema's order, its rows, its index in the list."""

    columns: str  # an int in hexadecimal: a wide schema has more bits than msgpack's integers
    start: int
    stop: int
    payload: int


class GroupState(msgspec.Struct, frozen=True):
    """State of a group. Leases are not saved: a leased group counts as not acked."""

    receipt: PutReceipt
    columns: str
    partial: tuple[tuple[str, str], ...]
    parts: tuple[PartState, ...]
    acked: tuple[str, ...]  # names of tasks
    age_s: float


class GoneState(msgspec.Struct, frozen=True, array_like=True):
    """A group that was cleared or lost, while it is remembered."""

    group: str
    attempt: int
    generation: int
    columns: str
    lost: str


class PartitionState(msgspec.Struct, frozen=True):
    """State of a partition, its groups in the order of their puts."""

    name: str
    schema: Schema
    tasks: tuple[tuple[str, tuple[str, ...]], ...]  # (name, columns)
    groups: tuple[GroupState, ...]
    gone: tuple[GoneState, ...]
    lost: int
    unreported: tuple[LostGroup, ...]


class QueueSnapshot(msgspec.Struct, frozen=True):
    """State of a whole queue. Counters continue, so an old handle never refers to something new."""

    generation: int
    last_lease: int
    last_waiter: int
    partitions: list[PartitionState]


def freeze(home: Partition, now: float, payloads: list[object]) -> PartitionState:
    """Return the partition as data; append its payloads to the list."""
    return PartitionState(
        name=home.name,
        schema=home.schema,
        tasks=tuple((task.name, task.columns) for task in home.tasks.values()),
        groups=tuple(_freeze_group(home, group, now, payloads) for group in home.groups.values()),
        gone=tuple(
            GoneState(name, gone.attempt, gone.generation, f"{gone.columns:x}", gone.lost)
            for name, gone in home.gone.items()
        ),
        lost=home.lost,
        unreported=tuple(home.unreported),
    )


def _freeze_group(
    home: Partition, group: StoredGroup, now: float, payloads: list[object]
) -> GroupState:
    parts: list[PartState] = []
    rows = group.receipt.rows
    for columns, start, stop, payload in ((group.first, 0, rows, group.payload), *group.more):
        parts.append(PartState(f"{columns:x}", start, stop, len(payloads)))
        payloads.append(payload)
    return GroupState(
        receipt=group.receipt,
        columns=f"{group.columns:x}",
        partial=tuple((f"{bit:x}", f"{had:x}") for bit, had in group.partial),
        parts=tuple(parts),
        acked=tuple(task.name for task in home.tasks.values() if group.acked & task.bit),
        age_s=now - group.put_at,
    )


def thaw(
    state: PartitionState, payloads: Sequence[object], now: float, remembered: int
) -> Partition:
    """Restore the partition of a snapshot."""
    home = Partition(state.name, state.schema, remembered)
    for name, columns in state.tasks:
        home.task(name, columns)
    for each in state.groups:
        group = _thaw_group(each, payloads, now)
        home.groups[each.receipt.group] = group
        home.rows += each.receipt.rows
        home.nbytes += each.receipt.nbytes
        for name in each.acked:
            home.tasks[name].take_as_acked(group)
        for task in home.tasks.values():
            task.offer(group)
    for gone in state.gone[-remembered:] if remembered else ():
        home.gone[gone.group] = GroupTombstone(
            gone.attempt, gone.generation, int(gone.columns, 16), gone.lost
        )
    home.lost, home.unreported = state.lost, list(state.unreported)
    return home


def _thaw_group(state: GroupState, payloads: Sequence[object], now: float) -> StoredGroup:
    first, *more = state.parts
    return StoredGroup(
        receipt=state.receipt,
        generation=state.receipt.generation,
        first=int(first.columns, 16),
        columns=int(state.columns, 16),
        payload=payloads[first.payload],
        put_at=now - state.age_s,
        more=tuple(
            (int(part.columns, 16), part.start, part.stop, payloads[part.payload]) for part in more
        ),
        partial=tuple((int(bit, 16), int(had, 16)) for bit, had in state.partial),
    )
