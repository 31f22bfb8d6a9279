"""Who is here, and which of their calls wait."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from offbeat.transfer_queue.errors import QueueFull
from offbeat.transfer_queue.service.wire import Call, Reply


class Takes(Protocol):
    """Who answers."""

    def take(self, visit: "Visit", call: Call) -> None: ...
    def leave(self, visit: "Visit") -> None: ...


@dataclass(slots=True, eq=False)
class Visit:
    """One connection of a client; what it waits for ends with it."""

    desk: Takes
    answer: Callable[[Reply], None]
    client: str = ""
    maps: bool = False  # the client shares memory with us; else payloads travel in the messages
    waits: dict[int, int] = field(default_factory=dict[int, int])  # call -> waiter

    def call(self, call: Call) -> None:
        """Take a call; ``answer`` is told the reply, now or later, unless it is cancelled."""
        self.desk.take(self, call)

    def leave(self) -> None:
        """The connection is over. With the last one of its client, the client is."""
        self.desk.leave(self)


@dataclass(slots=True)
class Wait:
    """A call that waits in the core."""

    visit: Visit
    call: Call
    since: float
    timer: asyncio.TimerHandle
    full: QueueFull | None  # what a put was refused with
