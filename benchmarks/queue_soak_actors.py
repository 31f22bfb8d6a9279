"""Runs producers, consumers and starving consumers of the soak, each in a process to be killed.

They write down what they do before and after each call, in a file that outlives them. What a group holds
follows from its name, so a reader can check that it is what was put.
"""

import itertools
import os
import random
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.queue_soak_audit import Event, Kind, Put
from offbeat.messages.failures import OffbeatError
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.errors import LeaseExpired, QueuePayloadLost
from offbeat.queue_service.ray_actor import Handle, connect
from offbeat.transfer_queue.codec import Column, Ragged
from offbeat.transfer_queue.errors import StaleHandle

PARTITION: Final = "train"
SCORER: Final = "score"
TRAINER: Final = "learn"
TASKS: Final = (SCORER, TRAINER)
READS: Final = {SCORER: ("tokens", "reward"), TRAINER: ("tokens", "reward", "advantage")}
SPECS: Final = (
    ("tokens", "int64", True),
    ("logprobs", "float32", True),
    ("reward", "float32"),
    ("advantage", "float32"),
)
LEASE_S: Final = 2.0
ASK_S: Final = 1.0
PUT_S: Final = 60.0
SLOW_SHARE: Final = 0.01
"""Share of groups that the consumer keeps longer than its lease."""
RELEASE_SHARE: Final = 0.02
MOST_GROUPS_A_CLAIM: Final = 3


def content(group: str) -> dict[str, Column]:
    """Return a producer's group: 4 to 16 rows of up to 2,000 tokens, drawn from the name."""
    rng = np.random.default_rng(zlib.crc32(group.encode()))
    lengths = rng.integers(1, 2000, int(rng.integers(4, 17)))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    total = int(offsets[-1])
    return {
        "tokens": Ragged(rng.integers(0, 150_000, total, dtype=np.int64), offsets),
        "logprobs": Ragged(rng.random(total, dtype=np.float32), offsets),
        "reward": rng.random(len(lengths), dtype=np.float32),
    }


def advantage(group: str) -> Column:
    """Return the column that a scorer adds."""
    reward = content(group)["reward"]
    return np.asarray(reward) - np.float32(0.5)


def _same(got: Column, want: Column) -> bool:
    if isinstance(want, Ragged):
        return (
            isinstance(got, Ragged)
            and np.array_equal(got.offsets, want.offsets)
            and np.array_equal(got.values, want.values)
        )
    return np.array_equal(np.asarray(got), np.asarray(want))


class Log:
    """Lines that are in the system's hands when ``add`` returns: a killed process loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, kind: Kind, puts: Sequence[Put], task: str = "", lease: int = 0) -> None:
        """Log one event per group."""
        now = time.monotonic()
        events = [Event(now, kind, *put, task, lease) for put in puts]
        os.write(self._fd, b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def put_logged(client: SyncTransferQueueClient, log: Log, put: Put) -> None:
    """Put the group, and say so."""
    columns = content(put.group)
    rewards = np.asarray(columns["reward"]).tolist()
    log.add(Kind.PUT_BEGUN, (put,))
    client.put(
        PARTITION, put.group, columns, {"reward": rewards}, attempt=put.attempt, deadline_s=PUT_S
    )
    log.add(Kind.PUT_ENDED, (put,))


class _Worker:
    """Base of all workers: a client, a log, a way to be stopped."""

    def __init__(self, queue: Handle, log: str, seed: int) -> None:
        # There are more of us than cores: what is timed is the queue, not its turn to run.
        os.nice(10)
        self._client = connect(queue)
        self._log = Log(Path(log))
        self._rng = random.Random(seed)
        self._stopping = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """``run`` returns after what it is at."""
        self._stopping.set()


class SoakProducer(_Worker):
    """Puts groups one after another."""

    def __init__(self, queue: Handle, log: str, seed: int, name: str) -> None:
        super().__init__(queue, log, seed)
        self._name = name

    def run(self, first: int, unfinished: Sequence[Put]) -> None:
        """Repeat the unanswered puts of a former incarnation, then put groups from ``first`` on."""
        for put in unfinished:
            put_logged(self._client, self._log, put)
        for number in itertools.count(first):
            if self._stopping.is_set():
                break
            put_logged(self._client, self._log, Put(f"{self._name}-{number}", 0))
        self._client.close()


class SoakConsumer(_Worker):
    """Claims groups for one task, looks at what is in them, and acks.

    At times late, or not at all.
    """

    def __init__(self, queue: Handle, log: str, seed: int, task: str) -> None:
        super().__init__(queue, log, seed)
        self._task = task

    def run(self) -> None:
        """Run until stopped."""
        while not self._stopping.is_set():
            lease = self._client.claim(
                PARTITION,
                self._task,
                self._rng.choice((1, 1, MOST_GROUPS_A_CLAIM)),
                READS[self._task],
                lease_s=LEASE_S,
                deadline_s=ASK_S,
            )
            if lease is not None:
                self._consume(lease)
                del lease  # and the views with it
        self._client.close()

    def _consume(self, lease: ClientLease) -> None:
        puts = [Put(receipt.group, receipt.attempt) for receipt in lease.receipts]
        self._log.add(Kind.DELIVERED, puts, self._task, lease.id)
        try:
            wrong = self._wrong(lease)
        except QueuePayloadLost:
            return  # the client has reported it; the rest comes again when the lease ends
        except StaleHandle:  # kept too long; others have had it meanwhile, and it is cleared
            return
        if wrong:
            self._log.add(Kind.WRONG, wrong, self._task, lease.id)
        if self._rng.random() < RELEASE_SHARE:
            self._client.release(lease)
            self._log.add(Kind.RELEASED, puts, self._task, lease.id)
            return
        if self._rng.random() < SLOW_SHARE:
            self._stopping.wait(1.5 * LEASE_S)
        if self._task == SCORER and not self._scored(lease):
            return
        self._log.add(Kind.ACK_BEGUN, puts, self._task, lease.id)
        try:
            self._client.ack(lease)
        except LeaseExpired:
            self._log.add(Kind.ACK_REFUSED, puts, self._task, lease.id)
        else:
            self._log.add(Kind.ACK_ENDED, puts, self._task, lease.id)

    def _wrong(self, lease: ClientLease) -> list[Put]:
        """Groups with another content than was put."""
        found: list[Put] = []
        names = READS[self._task]
        for receipt, columns in zip(
            lease.receipts, self._client.get_each(lease, names), strict=True
        ):
            want = content(receipt.group) | {"advantage": advantage(receipt.group)}
            if not all(_same(columns[name], want[name]) for name in names):
                found.append(Put(receipt.group, receipt.attempt))
        return found

    def _scored(self, lease: ClientLease) -> bool:
        """Return whether this scorer added the advantages.

        False if another has done it all meanwhile.
        """
        for receipt in lease.receipts:
            try:
                self._client.add_columns(receipt, {"advantage": advantage(receipt.group)})
            except StaleHandle:
                return False
        return True


class SoakStarver(_Worker):
    """Waits for groups that are never put."""

    def run(self) -> int:
        """Return how often it waited in vain, until stopped."""
        waits = 0
        while not self._stopping.is_set():
            got = self._client.claim(
                PARTITION,
                "starve",
                1,
                ("tokens",),
                where=(("reward", ">", 2.0),),
                lease_s=LEASE_S,
                deadline_s=ASK_S,
            )
            if got is not None:
                raise WrongDelivery(got.id)
            waits += 1
        self._client.close()
        return waits


class WrongDelivery(OffbeatError):
    """Groups came that do not match the predicate."""

    def __init__(self, lease_id: int) -> None:
        super().__init__(lease_id)
        self.lease_id = lease_id

    def __str__(self) -> str:
        return f"lease {self.lease_id} has groups that do not match its predicate"
