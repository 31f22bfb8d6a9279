"""A client's connections, and the calls that wait on them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.queue_service.errors import QueueFull
from offbeat.queue_service.wire import Reply, WireCall


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of a client; its waiting calls end with it."""

    answer: Callable[[Reply], None]
    client: str = ""
    maps: bool = False  # whether the client shares memory; else payloads travel in the messages
    waits: dict[int, int] = field(default_factory=dict[int, int])  # waiter id by call id


@dataclass(slots=True)
class PendingCall:
    """A call that waits in the core."""

    connection: Connection
    call: WireCall
    since: float
    timer: asyncio.TimerHandle
    full: QueueFull | None  # error that a put got when it was refused
