"""The process of one client: a producer or a consumer, and the loops that are timed in it.

Clocks are ``time.monotonic``, which all processes of a machine share. Payloads are made before a loop.
Every loop that consumes counts the rows that did not come exactly once, by the number of their group,
which their rewards carry: a queue of rows may hand out rows of several groups together.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks import queue_payloads as payloads
from benchmarks.queue_sides import Handle, Prepared, Side, Taken, entry


@dataclass(slots=True)
class Times:
    """Seconds each call took, and when puts began, takes ended, and the whole loop did."""

    put_at_s: list[float] = field(default_factory=list[float])
    taken_at_s: list[float] = field(default_factory=list[float])
    put_s: list[float] = field(default_factory=list[float])
    take_s: list[float] = field(default_factory=list[float])
    done_s: list[float] = field(default_factory=list[float])
    began_s: float = 0.0
    ended_s: float = 0.0
    wrong_rows: int = 0


class QueueClient:
    """Client with both halves: the driver has one produce and another consume.

    No method is async: one would make Ray run all of them on an event loop.
    """

    def __init__(self, side: str, handle: Handle) -> None:
        torch.set_num_threads(1)
        self._side: Side = entry(side).connect(handle)
        self._calls: list[Prepared] = []
        self._example: payloads.Columns = {}

    def pid(self) -> int:
        return os.getpid()

    def prepare(self, count: int, tokens: int, groups_a_call: int = 1) -> int:
        """Payloads for the loops below; their bytes."""
        made = [payloads.group(number, tokens) for number in range(count * groups_a_call)]
        self._example = made[0]
        self._calls = [
            self._side.prepare(made[first : first + groups_a_call])
            for first in range(0, len(made), groups_a_call)
        ]
        return sum(payloads.payload_bytes(columns) for columns in made)

    def prepare_columns(self, count: int, columns: int, payload_bytes: int) -> None:
        """Payloads of as many bytes each, in as many columns."""
        made = [payloads.split(number, columns, payload_bytes) for number in range(count)]
        self._example, self._calls = made[0], [self._side.prepare([each]) for each in made]

    def prepare_large(self, megabytes: int) -> int:
        """Prepare one payload of one large column."""
        made = payloads.large(megabytes)
        self._example, self._calls = made, [self._side.prepare([made])]
        return payloads.payload_bytes(made)

    def declare(self, *partitions: str) -> None:
        """Declare the partition for groups like those prepared."""
        for partition in partitions:
            self._side.declare(partition, self._example)

    def cycle(self, partition: str, count: int, names: Sequence[str]) -> Times:
        """Put a group, take it and let it go, in one process."""
        times = Times(began_s=time.monotonic())
        for index in range(count):
            payload = self._calls[index % len(self._calls)]
            began = time.monotonic()
            self._side.put(partition, payload)
            put = time.monotonic()
            taken = self._side.take(partition, 1, names)
            took = time.monotonic()
            self._side.done(partition, taken)
            times.put_s.append(put - began)
            times.take_s.append(took - put)
            times.done_s.append(time.monotonic() - took)
        times.ended_s = time.monotonic()
        return times

    def produce(self, partition: str, calls: int, gap_s: float = 0.0) -> Times:
        """Put one payload a call, at once or one every ``gap_s``."""
        times = Times(began_s=time.monotonic())
        for index in range(calls):
            if gap_s:
                time.sleep(gap_s)
            began = time.monotonic()
            self._side.put(partition, self._calls[index])
            times.put_at_s.append(began)
            times.put_s.append(time.monotonic() - began)
        times.ended_s = time.monotonic()
        return times

    def consume(
        self, partition: str, calls: int, names: Sequence[str], groups_a_call: int = 1
    ) -> Times:
        """Take and let go."""
        times, numbers = Times(began_s=time.monotonic()), list[int]()
        for _ in range(calls):
            began = time.monotonic()
            taken = self._side.take(partition, groups_a_call, names)
            took = time.monotonic()
            times.taken_at_s.append(took)
            numbers += _numbers(taken)
            released = time.monotonic()
            self._side.done(partition, taken)
            del taken
            times.take_s.append(took - began)
            times.done_s.append(time.monotonic() - released)
        times.ended_s = time.monotonic()
        times.wrong_rows = wrong_rows(numbers, calls * groups_a_call)
        return times

    def read(self, partition: str, names: Sequence[str]) -> tuple[float, float, float]:
        """Take one payload: seconds of the take, of reading every byte, and of letting go."""
        began = time.monotonic()
        taken = self._side.take(partition, 1, names)
        took = time.monotonic()
        sum(float(row.sum()) for columns in taken.columns for row in columns["x"])
        read = time.monotonic()
        self._side.done(partition, taken)
        return took - began, read - took, time.monotonic() - read

    def produce_side_by_side(self, partition: str, calls: int, width: int) -> Times:
        """The async client, with as many puts on their way at once."""
        return self._side.run(_produce(self._side, partition, self._calls[:calls], width))

    def consume_side_by_side(
        self, partition: str, calls: int, names: Sequence[str], width: int
    ) -> Times:
        """The async client, with as many takes on their way at once."""
        return self._side.run(_consume(self._side, partition, calls, names, width))

    def bytes_in_use(self) -> int | None:
        """Return the bytes that the queue counts as held."""
        return self._side.bytes_in_use()

    def clear(self, partition: str) -> float:
        """Seconds it took to let go of everything in the partition."""
        began = time.monotonic()
        self._side.clear(partition)
        return time.monotonic() - began


def _numbers(taken: Taken) -> list[int]:
    """Return the group number of each row."""
    return [int(float(row[0])) for each in taken.columns for row in each[payloads.REWARD]]


def wrong_rows(numbers: Sequence[int], groups: int) -> int:
    """Rows that are missing or came too often: every group up to ``groups`` has as many."""
    came = Counter(numbers)
    came.subtract(dict.fromkeys(range(groups), payloads.SAMPLES))
    return sum(abs(surplus) for surplus in came.values())


async def _produce(side: Side, partition: str, calls: Sequence[Prepared], width: int) -> Times:
    times, left = Times(began_s=time.monotonic()), iter(calls)

    async def worker() -> None:
        for payload in left:
            await side.aput(partition, payload)

    await asyncio.gather(*(worker() for _ in range(width)))
    times.ended_s = time.monotonic()
    return times


async def _consume(
    side: Side, partition: str, calls: int, names: Sequence[str], width: int
) -> Times:
    times, left, numbers = Times(began_s=time.monotonic()), iter(range(calls)), list[int]()

    async def worker() -> None:
        for _ in left:
            taken = await side.atake(partition, 1, names)
            numbers.extend(_numbers(taken))
            await side.adone(partition, taken)

    await asyncio.gather(*(worker() for _ in range(width)))
    times.ended_s = time.monotonic()
    times.wrong_rows = wrong_rows(numbers, calls)
    return times
