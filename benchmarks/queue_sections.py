"""The sections of the queue benchmark: each runs one round on one side and returns its figures.

cycle     one process puts a group, takes it, lets it go
latency   from the begin of a put to the rows in the consumer's hands, at a gentle pace
stream    as fast as producer and consumer go: a group a call, 16 a call, 8 calls side by side
large     one column of 64 MB
columns   the same bytes in 1 to 32 columns
memory    what is held for the groups in the queue, and after they are cleared
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ray

from benchmarks import queue_payloads as payloads
from benchmarks.queue_client import Times
from benchmarks.queue_figures import PEER, REFS, Bar, Measure, percentile
from benchmarks.queue_memory import resident_bytes, session_pids

SETTLE_S: Final = 2.0
"""Releases reach the object store, and a heap its system, a moment after the call that caused them."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two client processes of a side."""

    producer: Any
    consumer: Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """Size of one round of each section."""

    tokens: int = 2048
    small_tokens: int = 8
    cycles: int = 100
    paced: int = 60
    gap_s: float = 0.02
    streamed: int = 200
    groups_a_call: int = 16
    batched_calls: int = 20
    width: int = 8
    large_mib: int = 64
    large_calls: int = 5
    column_counts: tuple[int, ...] = (1, 8, 32)
    groups_held: int = 500
    names: tuple[str, ...] = payloads.NAMES

    @staticmethod
    def quick() -> "Sizes":
        """Seconds in all."""
        return Sizes(
            cycles=10, paced=10, streamed=20, batched_calls=3, large_calls=2, groups_held=30
        )


def cycle(pair: Pair, sizes: Sizes, partition: str) -> dict[str, float]:
    """Measure one process: tiny groups, then whole ones."""
    figures: dict[str, float] = {}
    for kind, tokens in (("small", sizes.small_tokens), ("group", sizes.tokens)):
        place = f"{partition}_{kind}"
        ray.get(pair.producer.prepare.remote(1, tokens))
        ray.get(pair.producer.declare.remote(place))
        times: Times = ray.get(pair.producer.cycle.remote(place, sizes.cycles, sizes.names))
        both = [put + take for put, take in zip(times.put_s, times.take_s, strict=True)]
        figures |= {
            f"{kind}_put": percentile(times.put_s, 0.5) * 1e3,
            f"{kind}_take": percentile(times.take_s, 0.5) * 1e3,
            f"{kind}_p50": percentile(both, 0.5) * 1e3,
            f"{kind}_p99": percentile(both, 0.99) * 1e3,
            f"{kind}_done": percentile(times.done_s, 0.5) * 1e3,
        }
    return figures


def latency(pair: Pair, sizes: Sizes, partition: str) -> dict[str, float]:
    """Measure between two processes; the consumer is waiting when the put begins."""
    figures: dict[str, float] = {}
    for kind, tokens in (("small", sizes.small_tokens), ("group", sizes.tokens)):
        place = f"{partition}_{kind}"
        ray.get(pair.producer.prepare.remote(sizes.paced, tokens))
        ray.get(pair.producer.declare.remote(place))
        takes = pair.consumer.consume.remote(place, sizes.paced, sizes.names)
        puts = pair.producer.produce.remote(place, sizes.paced, sizes.gap_s)
        put, took = _both(puts, takes)
        waits = [end - begin for begin, end in zip(put.put_at_s, took.taken_at_s, strict=True)]
        figures[f"latency_{kind}"] = percentile(waits, 0.5) * 1e3
        figures[f"latency_{kind}_p99"] = percentile(waits, 0.99) * 1e3
    return figures


def stream(pair: Pair, sizes: Sizes, partition: str) -> dict[str, float]:
    """Groups a second, from the begin of the first put to the last group let go."""
    count, names, width = sizes.streamed, sizes.names, sizes.width
    aside, batched = f"{partition}_aside", f"{partition}_batched"
    ray.get(pair.producer.prepare.remote(count, sizes.tokens))
    ray.get(pair.producer.declare.remote(partition, aside, batched))
    takes = pair.consumer.consume.remote(partition, count, names)
    puts = pair.producer.produce.remote(partition, count)
    single = _both(puts, takes)
    takes = pair.consumer.consume_side_by_side.remote(aside, count, names, width)
    puts = pair.producer.produce_side_by_side.remote(aside, count, width)
    side_by_side = _both(puts, takes)
    many, calls = sizes.groups_a_call, sizes.batched_calls
    ray.get(pair.producer.prepare.remote(calls, sizes.tokens, many))
    takes = pair.consumer.consume.remote(batched, calls, names, many)
    puts = pair.producer.produce.remote(batched, calls)
    batches = _both(puts, takes)
    return {
        "stream": _rate(count, *single),
        "stream_aside": _rate(count, *side_by_side),
        "stream_batched": _rate(calls * many, *batches),
        "wrong_rows": sum(took.wrong_rows for _, took in (single, side_by_side, batches)),
    }


def large(pair: Pair, sizes: Sizes, partition: str) -> dict[str, float]:
    """A round's best: pages are cold the first time, for every side."""
    held_bytes: int = ray.get(pair.producer.prepare_large.remote(sizes.large_mib))
    ray.get(pair.producer.declare.remote(partition))
    puts, takes, reads = list[float](), list[float](), list[float]()
    for _ in range(sizes.large_calls):
        times: Times = ray.get(pair.producer.produce.remote(partition, 1))
        take_s, read_s, _ = ray.get(pair.consumer.read.remote(partition, ("x", payloads.REWARD)))
        puts.append(times.put_s[0])
        takes.append(take_s)
        reads.append(take_s + read_s)
    return {
        "large_put": held_bytes / 1e9 / min(puts),
        "large_take": held_bytes / 1e9 / min(takes),
        "large_read": held_bytes / 1e9 / min(reads),
    }


def columns(pair: Pair, sizes: Sizes, partition: str) -> dict[str, float]:
    """Measure the same bytes in more columns; ``flat`` is the cost of the most columns over one."""
    figures: dict[str, float] = {}
    volume = payloads.SAMPLES * sizes.tokens * 13
    for count in sizes.column_counts:
        place = f"{partition}_{count}"
        streamed = f"{place}_stream"
        ray.get(pair.producer.prepare_columns.remote(sizes.streamed, count, volume))
        ray.get(pair.producer.declare.remote(place, streamed))
        names = (*(f"column_{index}" for index in range(count)), payloads.REWARD)
        times: Times = ray.get(pair.producer.cycle.remote(place, sizes.cycles // 2, names))
        both = [put + take for put, take in zip(times.put_s, times.take_s, strict=True)]
        figures[f"columns_{count}"] = statistics.median(both) * 1e3
        takes = pair.consumer.consume.remote(streamed, sizes.streamed, names)
        puts = pair.producer.produce.remote(streamed, sizes.streamed)
        figures[f"stream_{count}"] = _rate(sizes.streamed, *_both(puts, takes))
    most, fewest = max(sizes.column_counts), min(sizes.column_counts)
    figures["columns_flat"] = figures[f"columns_{most}"] / figures[f"columns_{fewest}"]
    figures["stream_flat"] = figures[f"stream_{fewest}"] / figures[f"stream_{most}"]
    return figures


def memory(pair: Pair, sizes: Sizes, partition: str) -> dict[str, float]:
    """Over the payload's bytes, from before the first put.

    With all groups held, and after a clear.
    """
    payload_bytes: int = ray.get(pair.producer.prepare.remote(sizes.groups_held, sizes.tokens))
    ray.get(pair.producer.declare.remote(partition))
    pids = session_pids()

    def now() -> tuple[int | None, int]:
        return ray.get(pair.consumer.bytes_in_use.remote()), resident_bytes(pids)

    before = now()
    ray.get(pair.producer.produce.remote(partition, sizes.groups_held))
    usage = now()
    clear_s: float = ray.get(pair.producer.clear.remote(partition))
    time.sleep(SETTLE_S)
    figures = {"clear": clear_s * 1e3}
    for when, (in_use, resident) in (("held", usage), ("cleared", now())):
        figures[f"resident_{when}"] = (resident - before[1]) / payload_bytes
        if in_use is not None and before[0] is not None:
            figures[f"in_use_{when}"] = (in_use - before[0]) / payload_bytes
    return figures


def _both(puts: "ray.ObjectRef[Times]", takes: "ray.ObjectRef[Times]") -> tuple[Times, Times]:
    put, took = ray.get([puts, takes])
    return put, took


def _rate(groups: int, puts: Times, takes: Times) -> float:
    return groups / (takes.ended_s - puts.began_s)


SECTIONS: Final[Mapping[str, Callable[[Pair, Sizes, str], dict[str, float]]]] = {
    "memory": memory,
    "cycle": cycle,
    "latency": latency,
    "stream": stream,
    "large": large,
    "columns": columns,
}

MEASURES: Final = (
    Measure("stream", "stream, a group a call", "groups/s", "higher"),
    Measure("stream_batched", "stream, 16 groups a call", "groups/s", "higher"),
    Measure("stream_aside", "stream, 8 calls side by side", "groups/s", "higher"),
    Measure("wrong_rows", "rows of them lost or repeated", "rows", "lower"),
    Measure("group_p50", "put+get of a group, p50", "ms", "lower"),
    Measure("group_p99", "put+get of a group, p99", "ms", "lower"),
    Measure("group_put", "  put alone, p50", "ms", "lower"),
    Measure("group_take", "  get alone, p50", "ms", "lower"),
    Measure("group_done", "  letting go, p50", "ms", "lower"),
    Measure("small_p50", "put+get of a tiny group, p50", "ms", "lower"),
    Measure("small_p99", "put+get of a tiny group, p99", "ms", "lower"),
    Measure("latency_small", "producer to consumer, tiny, p50", "ms", "lower"),
    Measure("latency_small_p99", "producer to consumer, tiny, p99", "ms", "lower"),
    Measure("latency_group", "producer to consumer, group, p50", "ms", "lower"),
    Measure("large_put", "64 MB put", "GB/s", "higher"),
    Measure("large_take", "64 MB get", "GB/s", "higher"),
    Measure("large_read", "64 MB get and one pass over it", "GB/s", "higher"),
    Measure("columns_1", "put+get, 1 column", "ms", "lower"),
    Measure("columns_8", "put+get, 8 columns", "ms", "lower"),
    Measure("columns_32", "put+get, 32 columns", "ms", "lower"),
    Measure("columns_flat", "put+get, 32 columns over 1", "x", "lower"),
    Measure("stream_1", "stream, 1 column", "groups/s", "higher"),
    Measure("stream_32", "stream, 32 columns", "groups/s", "higher"),
    Measure("stream_flat", "stream, 1 column over 32", "x", "lower"),
    Measure("in_use_held", "bytes in use / payload, held", "x", "lower"),
    Measure("in_use_cleared", "bytes in use / payload, cleared", "x", "lower"),
    Measure("resident_held", "resident / payload, held", "x", "lower"),
    Measure("resident_cleared", "resident / payload, cleared", "x", "lower"),
    Measure("clear", "clear of the partition", "ms", "lower"),
)
_BY_KEY: Final = {measure.key: measure for measure in MEASURES}

BARS: Final = (
    Bar(_BY_KEY["stream"], PEER, 5),
    Bar(_BY_KEY["stream_batched"], PEER, 10),
    Bar(_BY_KEY["wrong_rows"], None, 0),
    Bar(_BY_KEY["group_p50"], PEER, 2.5),
    Bar(_BY_KEY["group_p50"], REFS, 1 / 1.2),
    Bar(_BY_KEY["latency_small"], PEER, 2.5),
    Bar(_BY_KEY["large_put"], PEER, 5),
    Bar(_BY_KEY["large_take"], PEER, 10),
    Bar(_BY_KEY["columns_flat"], None, 1.2),
    Bar(_BY_KEY["stream_flat"], None, 1.2),
    Bar(_BY_KEY["in_use_held"], None, 1.1),
    Bar(_BY_KEY["in_use_cleared"], None, 0.001),
)
