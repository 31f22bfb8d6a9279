"""Audits the events of a soak's actors. Pure: events in, sentences out.

An event is written down before (``*_BEGUN``) or after a call, into a file that outlives its actor. So a
call whose actor was killed in it shows as begun and not ended: it may have been done or not.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec


class Kind(StrEnum):
    """Kinds of events of a group."""

    PUT_BEGUN = "put_begun"
    PUT_ENDED = "put_ended"
    DELIVERED = "delivered"
    RELEASED = "released"
    ACK_BEGUN = "ack_begun"
    ACK_ENDED = "ack_ended"
    ACK_REFUSED = "ack_refused"
    WRONG = "wrong"  # the content is not what was put
    LOST = "lost"  # as the queue reported it


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One line of a log."""

    at_s: float
    kind: Kind
    group: str
    attempt: int
    task: str = ""
    lease: int = 0


class Put(NamedTuple):
    """One put, and its repetitions."""

    group: str
    attempt: int


def read_log(lines: Iterable[bytes]) -> list[Event]:
    """The events of one actor. A last line that was cut by a kill is none."""
    return [msgspec.json.decode(line, type=Event) for line in lines if line.endswith(b"\n")]


def unfinished(events: Iterable[Event]) -> list[Put]:
    """Puts that were begun and not answered, in order."""
    open_: dict[Put, None] = {}
    for event in events:
        put = Put(event.group, event.attempt)
        if event.kind is Kind.PUT_BEGUN:
            open_[put] = None
        elif event.kind is Kind.PUT_ENDED:
            open_.pop(put, None)
    return list(open_)


def violations(events: Sequence[Event], tasks: Collection[str]) -> list[str]:
    """A sentence for each broken promise. Every task is to have every group exactly once.

    Leases are numbered by the queue in the order it gave them, so no clocks are compared.
    """
    seen: defaultdict[Kind, defaultdict[Put, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        seen[event.kind][Put(event.group, event.attempt)].append(event)
    ended, lost = seen[Kind.PUT_ENDED], seen[Kind.LOST]
    found = [
        f"{event.group} attempt {event.attempt}: delivered to {event.task} with another content"
        for wrong in seen[Kind.WRONG].values()
        for event in wrong
    ]
    found += [f"{_named(put)}: put, and never acknowledged" for put in _never_ended(seen)]
    found += [
        f"{_named(put)}: delivered, but never put"
        for put in seen[Kind.DELIVERED]
        if put not in seen[Kind.PUT_BEGUN]
    ]
    for put in lost:
        if not any(other.group == put.group and other.attempt > put.attempt for other in ended):
            found.append(f"{_named(put)}: reported lost, and not put again")
    for put in ended:
        if put not in lost:
            for task in tasks:
                found += _delivery_of(put, task, seen)
    return found


def _delivery_of(
    put: Put, task: str, seen: defaultdict[Kind, defaultdict[Put, list[Event]]]
) -> list[str]:
    def leases(kind: Kind) -> set[int]:
        return {event.lease for event in seen[kind].get(put, ()) if event.task == task}

    acked = leases(Kind.ACK_ENDED)
    perhaps = leases(Kind.ACK_BEGUN) - acked - leases(Kind.ACK_REFUSED)
    if not acked:
        return [] if perhaps else [f"{_named(put)}: acknowledged to its producer, lost to {task}"]
    found: list[str] = []
    if len(acked) > 1:
        found.append(f"{_named(put)}: acked by {task} under leases {sorted(acked)}")
    if late := [lease for lease in leases(Kind.DELIVERED) if lease > min(acked)]:
        found.append(f"{_named(put)}: acked by {task} under {min(acked)}, delivered under {late}")
    return found


def _never_ended(seen: defaultdict[Kind, defaultdict[Put, list[Event]]]) -> list[Put]:
    return [put for put in seen[Kind.PUT_BEGUN] if put not in seen[Kind.PUT_ENDED]]


def _named(put: Put) -> str:
    return f"{put.group} attempt {put.attempt}"
