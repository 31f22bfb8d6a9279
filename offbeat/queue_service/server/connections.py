"""Connections of clients, with their waiting calls."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.queue_service.errors import QueueFull
from offbeat.queue_service.wire import Reply, WireCall


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of a client; what it waits for ends with it."""

    answer: Callable[[Reply], None]
    client: str = ""
    maps: bool = False  # the client shares memory with us; else payloads travel in the messages
    waits: dict[int, int] = field(default_factory=dict[int, int])  # call -> waiter


@dataclass(slots=True)
class PendingCall:
    """A call that waits in the core."""

    visit: Connection
    call: WireCall
    since: float
    timer: asyncio.TimerHandle
    full: QueueFull | None  # what a put was refused with
