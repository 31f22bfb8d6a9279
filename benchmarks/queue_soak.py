"""The transfer queue under kills.

8 producers and 8 consumers, seeded, and an audit of all they saw.

    python -m benchmarks.queue_soak [--seconds 600] [--seed N] [--kill-every-s S] [--keep DIRECTORY]

Actors are killed at random moments and started anew; consumers are slow at times and lose their leases;
two consumers starve all along. At the end everything is drained. Exit code 1, with the seed, if a group
was lost silently, delivered after its ack or with another content, or if memory, descriptors or the
time from a put to the waiter it serves are not what they are to be. A killed producer's open put is
repeated by its successor; groups the queue reports lost are put again as a newer attempt.
"""

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray.exceptions import RayActorError

from benchmarks.queue_memory import actor_pid, resident_bytes
from benchmarks.queue_soak_actors import (
    PARTITION,
    SPECS,
    TASKS,
    Log,
    SoakConsumer,
    SoakProducer,
    SoakStarver,
    put_logged,
)
from benchmarks.queue_soak_audit import Event, Kind, Put, read_log, unfinished, violations
from offbeat.queue_service.core import QueueLimits
from offbeat.queue_service.ray_actor import Handle, connect, start
from offbeat.queue_service.wire import ServiceStats

PRODUCERS: Final = 8
CONSUMERS_A_TASK: Final = 4
STARVERS: Final = 2
LIMITS: Final = QueueLimits(max_rows=2_000, max_bytes=64 << 20, remembered=4096)
DRAIN_S: Final = 120.0
SETTLE_S: Final = 3.0
FREED_S: Final = 5.0
"""From the last ack until no memory is in use.

Small views are reported with a consumer's next call.
"""

SLOWEST_WAKE_S: Final = 0.005
"""From a put applied to the waiter it serves being answered, p99, inside the queue's process."""

MOST_GROWN_BYTES: Final = 64 << 20
"""Of the queue's process, heap and shared memory, from before the first put to after the last ack:
room for allocators that keep what they once had, and for the groups whose late callers are known."""
MOST_FDS_GROWN: Final = 8


@dataclass(slots=True)
class Post:
    """A place that is always filled: its actor is replaced when it is killed."""

    name: str
    incarnations: int = 0
    actor: Any = None
    pid: int = 0
    running: Any = None
    logs: list[Path] = field(default_factory=list[Path])

    def events(self) -> list[Event]:
        """Return the events of all its incarnations."""
        return [event for log in self.logs if log.exists() for event in _told(log)]


class Soak:
    """Fills the posts, kills, and collects what is wrong."""

    def __init__(self, queue: Handle, logs: Path, rng: random.Random) -> None:
        self._queue, self._logs, self._rng = queue, logs, rng
        self._client = connect(queue)
        self._own = logs / "harness.jsonl"
        self._log = Log(self._own)
        self.wrong: list[str] = []
        self.kills: Counter[str] = Counter()
        self.producers = [Post(f"producer{index}") for index in range(PRODUCERS)]
        self.consumers = [
            Post(f"{task}{index}") for task in TASKS for index in range(CONSUMERS_A_TASK)
        ]
        self.starvers = [Post(f"starver{index}") for index in range(STARVERS)]

    @property
    def posts(self) -> list[Post]:
        return [*self.producers, *self.consumers, *self.starvers]

    def start(self) -> None:
        """Fill every post."""
        self._client.declare(PARTITION, SPECS, consumers=TASKS)
        for post in self.posts:
            self._make(post)
        for post in self.posts:
            self._begin(post)

    def run(self, seconds: float, kill_every_s: float) -> None:
        """Kill at random until the time is over."""
        ends = time.monotonic() + seconds
        while (left_s := ends - time.monotonic()) > 0:
            self._wait(min(left_s, self._rng.expovariate(1 / kill_every_s)))
            self._put_lost_again()
            if time.monotonic() < ends:
                self._kill(self._rng.choice([*self.producers, *self.consumers]))

    def drain(self) -> None:
        """Producers stop; consumers go on until nothing rests."""
        for post in self.producers:
            post.actor.stop.remote()
        self._ended(self.producers)
        ends = time.monotonic() + DRAIN_S
        while groups := self._client.stats().queue.groups:
            if time.monotonic() > ends:
                self.wrong.append(f"{groups} groups rest {DRAIN_S:g} s after the last put")
                break
            self._wait(0.2)
            self._put_lost_again()
        self._see_memory_freed()
        for post in (*self.consumers, *self.starvers):
            post.actor.stop.remote()
        self._ended([*self.consumers, *self.starvers])

    def _see_memory_freed(self) -> None:
        """Check that memory is freed before the consumers leave.

        Their end would free what they still hold.
        """
        ends = time.monotonic() + FREED_S
        while in_use := self._client.stats().arena_bytes:
            if time.monotonic() > ends:
                self.wrong.append(f"{in_use:,} bytes of payload are in use by nobody")
                break
            self._wait(0.2)

    def stats(self) -> ServiceStats:
        return self._client.stats()

    def close(self) -> None:
        self._client.close()

    def events(self) -> list[Event]:
        """Return all events of all processes."""
        return [*_told(self._own), *(event for post in self.posts for event in post.events())]

    def _make(self, post: Post) -> None:
        log = self._logs / f"{post.name}.{post.incarnations}.jsonl"
        post.incarnations += 1
        post.logs.append(log)
        seed = self._rng.getrandbits(32)
        if post in self.producers:
            post.actor = _remote(SoakProducer)(self._queue, str(log), seed, post.name)
        elif post in self.consumers:
            task = post.name.rstrip("0123456789")
            post.actor = _remote(SoakConsumer)(self._queue, str(log), seed, task)
        else:
            post.actor = _remote(SoakStarver)(self._queue, str(log), seed)

    def _begin(self, post: Post) -> None:
        post.pid = ray.get(post.actor.pid.remote(), timeout=60)
        if post not in self.producers:
            post.running = post.actor.run.remote()
            return
        events = post.events()
        numbers = [int(event.group.rpartition("-")[2]) for event in events]
        post.running = post.actor.run.remote(max(numbers, default=-1) + 1, unfinished(events))

    def _kill(self, post: Post) -> None:
        self.kills[post.name.rstrip("0123456789")] += 1
        os.kill(post.pid, signal.SIGKILL)
        with suppress(RayActorError):
            ray.get(post.running, timeout=60)
        self._make(post)
        self._begin(post)

    def _wait(self, seconds: float) -> None:
        """Wait, while no process may end by itself."""
        running = [post.running for post in self.posts if post.running is not None]
        ended, _ = ray.wait(running, timeout=seconds)
        if ended:
            ray.get(ended)
            raise RuntimeError("an actor of the soak ended without being stopped")

    def _ended(self, posts: Sequence[Post]) -> None:
        ray.get([post.running for post in posts], timeout=DRAIN_S)
        for post in posts:
            post.running = None
            ray.kill(post.actor)  # its process, and Ray's connections to it

    def _put_lost_again(self) -> None:
        for group in self._client.take_lost(PARTITION):
            self._log.add(Kind.LOST, [Put(group.group, group.attempt)])
            put_logged(self._client, self._log, Put(group.group, group.attempt + 1))


def _remote(actor: type) -> Callable[..., Any]:
    """Return its constructor, in a process of its own; a second thread takes ``stop``."""
    return ray.remote(actor).options(num_cpus=0, max_concurrency=2).remote


def _told(log: Path) -> list[Event]:
    return read_log(log.read_bytes().splitlines(keepends=True))


@dataclass(frozen=True, slots=True)
class Holdings:
    """Resources of the queue's process."""

    resident: int
    fds: int

    @staticmethod
    def of(pid: int) -> "Holdings":
        return Holdings(resident_bytes([pid]), psutil.Process(pid).num_fds())


def judged(before: Holdings, after: Holdings, stats: ServiceStats) -> list[str]:
    """Return which of the queue's own figures are wrong when everything is drained."""
    wrong: list[str] = []
    if stats.queue.leases or stats.queue.rows or stats.queue.nbytes or stats.queue.promised_rows:
        wrong.append(f"the drained queue holds {stats.queue}")
    if (grown := after.resident - before.resident) > MOST_GROWN_BYTES:
        wrong.append(f"the queue's process grew by {grown:,} bytes")
    if (grown := after.fds - before.fds) > MOST_FDS_GROWN:
        wrong.append(f"the queue's process has {grown} more descriptors")
    if stats.wake_p99_s > SLOWEST_WAKE_S:
        wrong.append(f"put to waiter took {stats.wake_p99_s * 1e3:.1f} ms (p99)")
    return wrong


def soak(seconds: float, seed: int, kill_every_s: float, logs: Path) -> list[str]:
    """Run one soak; return what was wrong."""
    queue = start(LIMITS)
    work = Soak(queue, logs, random.Random(seed))
    queue_pid = actor_pid("TransferQueueActor")
    before = Holdings.of(queue_pid)
    work.start()
    began = time.monotonic()
    work.run(seconds, kill_every_s)
    work.drain()
    took_s = time.monotonic() - began
    time.sleep(SETTLE_S)
    stats, after = work.stats(), Holdings.of(queue_pid)
    work.close()
    events = work.events()
    counts = Counter(event.kind for event in events)
    acked = counts[Kind.ACK_ENDED]
    print(f"{took_s:.0f} s, kills {dict(work.kills)}; {acked / took_s:.0f} acks/s")
    print(", ".join(f"{kind.value} {count:,}" for kind, count in sorted(counts.items())))
    print(
        f"queue: {(after.resident - before.resident) / 2**20:+.1f} MiB resident, "
        f"{after.fds - before.fds:+d} descriptors, put to waiter p99 {stats.wake_p99_s * 1e3:.2f} ms"
    )
    return work.wrong + judged(before, after, stats) + violations(events, TASKS)


def main() -> None:
    """Soak, print what was seen, exit 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description="The transfer queue under kills.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed by default")
    parser.add_argument("--kill-every-s", type=float, default=3.0, help="mean time between kills")
    parser.add_argument("--keep", type=Path, help="keep the actors' logs in this directory")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=200 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            logs = arguments.keep or Path(scratch)
            logs.mkdir(parents=True, exist_ok=True)
            wrong = soak(arguments.seconds, seed, arguments.kill_every_s, logs)
    finally:
        ray.shutdown()
    for line in wrong[:50]:
        print(f"WRONG: {line}")
    if wrong:
        print(f"{len(wrong)} violations. Again: --seed {seed} --seconds {arguments.seconds:g}")
        sys.exit(1)
    print("all promises held")


if __name__ == "__main__":
    main()
