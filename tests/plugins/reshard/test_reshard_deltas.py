"""Deltas of a reshard: what each rank's buckets change, from ranks that fail, have copies, or another plan.

What an engine may serve, ack or refuse is in ``test_delta_releases``, over all transports.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bench_parts import HASTY
from delta_line import Line, LoadingEngine, Ranks, TrainedModel, WholeTensorEngine
from reshard_bench import Held, copied, rows_of

from offbeat.messages.failures import BaseRefused, ReleaseLost, WeightSyncFailed
from offbeat.messages.weights import FullReason, WeightRelease
from offbeat.plugins.delta.shard_deltas import rebuilt_buckets
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import ReplicasDiverged, TransferRefused
from offbeat.weight_sync.manifest import digest_bytes

pytestmark = pytest.mark.real_clock

LAYOUTS: dict[str, tuple[int, Held]] = {
    "one rank": (1, rows_of(1)),
    "two shards": (2, rows_of(2)),
    "four shards": (4, rows_of(4)),
    "two copies of two shards": (4, copied(rows_of(2), 2)),
}
Made = Callable[..., Line]


@pytest.fixture
def line_of() -> Iterator[Made]:
    """Lines of ranks in any layout, with an engine that serves their first release."""
    made = list[Ranks]()

    def make(layout: str = "two shards", rows: int = 64, **options: Any) -> Line:
        model = TrainedModel(1, rows)
        made.append(Ranks(model, *LAYOUTS[layout], **options))
        return Line(made[-1], model)

    yield make
    for each in made:
        each.close()


def bench_of(line: Line) -> Any:
    assert isinstance(line.sender, Ranks)
    return line.sender.bench


def delta_bytes(release: WeightRelease) -> int:
    assert release.delta is not None, release.full_reason
    return release.delta.nbytes


@pytest.mark.parametrize("kind", [LoadingEngine, WholeTensorEngine])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_changes_from_any_layout_make_the_release_bit_for_bit(
    line_of: Made, layout: str, kind: type[LoadingEngine]
) -> None:
    line = line_of(layout)
    line.engine = kind()
    await line.served(line.published())
    for _ in range(3):
        new = line.published()
        assert delta_bytes(new) < 0.1 * new.nbytes
        await line.served(new)


async def test_one_value_in_a_hundred_costs_less_than_a_twentieth_of_the_bytes(
    line_of: Made,
) -> None:
    """And all that is sent is what the delta says."""

    line, sent = line_of(rows=13_000, bucket_bytes=100_000), list[int]()
    line.engine = LoadingEngine(rows=13_000)
    await line.served(line.published())
    new = line.published(share=0.01)
    for rank, server in enumerate(bench_of(line).servers):
        parts = server.offered.changes.buckets

        def count(bucket: int, parts: Any = parts) -> None:
            sent.append(parts[bucket].nbytes)

        bench_of(line).struck(rank, count)
    await line.served(new)
    assert sum(sent) == delta_bytes(new) < 0.05 * new.nbytes
    assert new.delta is not None
    assert 0.005 < new.delta.changed < 0.02


@pytest.mark.parametrize("layout", ["two shards", "two copies of two shards"])
async def test_at_every_bucket_a_rank_that_fails_is_replaced_by_its_copies_or_the_full_release_heals(
    line_of: Made, layout: str
) -> None:
    line = line_of(layout, timeouts=HASTY)
    bench, copies = bench_of(line), layout != "two shards"
    await line.served(line.published())
    for bucket in range(bench.count):
        before, new = line.engine.model.content(), line.published()
        assert delta_bytes(new)
        ((_, sender),) = bench.plan.routes[bucket].sender_by_receiver

        def strike(index: int, at: int = bucket) -> None:
            if index == at:
                raise OSError("disk on fire")

        bench.struck(sender, strike)
        if copies:
            await line.served(new)
            continue
        with pytest.raises(
            (WeightSyncFailed, ReleaseLost), match=r"no other rank holds bucket \d+ \('"
        ):
            await line.load(new)
        assert line.engine.model.content() == before, "it serves what it served"
        await line.served(line.published(), full=True)


async def test_a_rank_that_packs_by_a_new_plan_has_no_base_and_the_release_after_has(
    line_of: Made,
) -> None:
    line = line_of()
    await line.served(line.published())
    bench_of(line).follow(EngineLayout((), ((),)))
    planned = line.published()
    assert (planned.delta, planned.full_reason) == (None, FullReason.NO_BASE)
    await line.served(planned)
    after = line.published()
    assert delta_bytes(after)
    await line.served(after)


async def test_ranks_of_which_one_has_no_base_send_a_full_release(line_of: Made) -> None:
    line = line_of()
    await line.served(line.published())
    bench_of(line).senders[1].forget()
    new = line.published()
    assert (new.delta, new.full_reason) == (None, FullReason.NO_BASE)
    await line.served(new)
    await line.served(after := line.published())
    assert delta_bytes(after)


async def test_ranks_that_take_the_place_of_others_send_a_full_release_to_engines_of_any_base(
    line_of: Made,
) -> None:
    line = line_of()
    await line.served(line.published())
    new = line.published()
    line.sender.close()
    heirs = Ranks(line.model)
    line.sender = heirs
    with pytest.raises(ReleaseLost):
        await line.load(new)
    first = line.published()
    assert (first.delta, first.full_reason) == (None, FullReason.NO_BASE)
    await line.served(first)
    await line.served(line.published())
    heirs.close()


async def test_copies_that_diverge_are_named_and_leave_no_base(line_of: Made) -> None:
    line = line_of("two copies of two shards")
    await line.served(line.published())
    bench = bench_of(line)
    apart, bench.models = bench.models, [*bench.models[:3], TrainedModel(2)]
    with pytest.raises(ReplicasDiverged, match="ranks 1 and 3 have different copies of"):
        line.published()
    bench.models = apart
    new = line.published()
    assert (new.delta, new.full_reason) == (None, FullReason.NO_BASE)
    await line.served(new)


def test_a_release_that_is_still_being_sent_keeps_its_bytes_while_the_next_is_packed(
    line_of: Made,
) -> None:
    line, digests = line_of(), dict[int, str]()
    first = line.published()
    formers = [each.offered for each in bench_of(line).servers]
    assert delta_bytes(line.published())
    for former in formers:
        digests |= {bucket: digest_bytes(data) for bucket, data in former.buckets.items()}
    assert tuple(digests[each] for each in sorted(digests)) == first.manifest.chunk_digests


def test_changes_of_another_base_are_refused_by_the_digest_of_the_rebuilt_bucket(
    line_of: Made,
) -> None:
    """Where a worker rebuilds what it fetches itself, this is the last guard."""
    line = line_of()
    first = line.published()
    held = [each.offered.buckets for each in bench_of(line).servers]
    base = [{**held[0], **held[1]}[at] for at in range(len(first.manifest.chunk_nbytes))]
    line.published()
    new = line.published()
    assert new.delta is not None
    changes = [each.offered.changes.buckets for each in bench_of(line).servers]
    parts = [{**changes[0], **changes[1]}[at] for at in range(len(base))]
    with pytest.raises(TransferRefused, match="digest of rebuilt bucket 0"):
        rebuilt_buckets(1, new.manifest, range(len(base)), base, parts)


async def test_a_request_for_changes_that_are_gone_is_for_the_full_release(line_of: Made) -> None:
    line = line_of()
    await line.served(line.published())
    gone = line.published()
    line.published()
    with pytest.raises(ReleaseLost, match="now holds a different release"):
        await line.load(gone)
    with pytest.raises(BaseRefused):
        await line.load(line.published())
    await line.served(line.published(), full=True)
