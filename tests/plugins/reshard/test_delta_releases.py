"""Releases as what they change, from a sender to engine actors: the failure table, row by row.

Each case ends with a release that the engine serves bit for bit.
"""

from typing import Any

import msgspec
import pytest
import torch
from delta_line import Line, LoadingEngine, Ranks, TrainedModel

from offbeat.messages.failures import BaseRefused, CanaryFailed, WeightSyncFailed
from offbeat.messages.weights import FullReason
from offbeat.plugins.delta.kept_release import HeldRelease, rebuilt
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.object_store import ObjectStoreSender
from tests.support.loading import FENCE
from tests.support.plain_modules import ModuleReceiver, ModuleSource

pytestmark = pytest.mark.real_clock

CHUNK_BYTES = 4096


@pytest.fixture(params=["object_store", "reshard"])
def line(request: pytest.FixtureRequest) -> Any:
    model = TrainedModel(1)
    source = ModuleSource(model, CHUNK_BYTES)
    if request.param == "object_store":
        yield Line(ObjectStoreSender(source, delta=True), model)
        return
    made = Ranks(model)
    yield Line(made, model)
    made.close()


async def test_an_engine_that_serves_the_base_takes_the_changes_alone(line: Line) -> None:
    first = line.published()
    assert first.full_reason is FullReason.NO_BASE
    await line.served(first)
    for _ in range(3):
        new = line.published()
        assert new.delta is not None
        assert new.delta.nbytes < 0.1 * new.nbytes
        assert 0 < new.delta.changed < 0.1
        await line.served(new)


async def test_a_step_that_changes_nothing_is_a_delta_of_headers(line: Line) -> None:
    await line.served(first := line.published())
    again = line.published(share=None)
    assert again.delta is not None
    assert (again.delta.changed, again.digest) == (0.0, first.digest)
    await line.served(again)


async def test_a_chunk_that_changed_everywhere_goes_whole_in_a_delta_of_the_others(
    line: Line,
) -> None:
    await line.served(line.published())
    mixed = line.published(share=1.0)
    assert mixed.delta is not None
    sizes = zip(mixed.delta.manifest.chunk_nbytes, mixed.manifest.chunk_nbytes, strict=True)
    assert any(part == full + 24 for part, full in sizes)
    await line.served(mixed)


async def test_more_changes_than_the_bound_make_a_full_release(line: Line) -> None:
    await line.served(line.published())
    large = line.published(share=1.0)
    torch.nn.init.normal_(line.model.frozen)
    torch.nn.init.normal_(line.model.first)
    large = line.published()
    assert (large.delta, large.full_reason) == (None, FullReason.TOO_LARGE)
    await line.served(large)
    await line.served(line.published())


async def test_a_new_engine_refuses_a_delta_and_takes_the_full_release_of_that_version(
    line: Line,
) -> None:
    line.published()
    new = line.published()
    with pytest.raises(BaseRefused, match="serves no release of this run") as refused:
        await line.load(new)
    assert new.delta is not None
    assert refused.value.base == new.delta.base
    await line.served(new, full=True)
    await line.served(line.published())


async def test_an_engine_that_skipped_a_release_refuses_and_serves_on(line: Line) -> None:
    await line.served(first := line.published())
    line.published()
    before = line.engine.model.content()
    with pytest.raises(BaseRefused, match=first.digest):
        await line.load(line.published())
    assert line.engine.model.content() == before
    assert (await line.engine.state(FENCE)).digest == first.digest
    await line.served(line.published(), full=True)


async def test_a_delta_whose_ack_was_lost_is_not_applied_twice(line: Line) -> None:
    await line.served(line.published())
    new = line.published()
    await line.served(new)
    with pytest.raises(BaseRefused):
        await line.load(new)
    await line.served(new, full=True)
    await line.served(line.published())


async def test_a_restarted_engine_refuses_a_delta_whatever_version_it_names(line: Line) -> None:
    await line.served(line.published())
    line.engine, line.epoch = LoadingEngine(), 0
    new = line.published()
    with pytest.raises(BaseRefused):
        await line.load(new)
    await line.served(new, full=True)


async def test_after_a_rewind_the_next_release_is_a_full_one(line: Line) -> None:
    await line.served(line.published())
    line.sender.forget()
    again = line.published()
    assert (again.delta, again.full_reason) == (None, FullReason.NO_BASE)
    await line.served(again)
    await line.served(line.published())


async def test_an_engine_of_an_abandoned_line_refuses_a_delta_of_the_same_version(
    line: Line,
) -> None:
    """Versions are equal on both lines; digests are not."""

    await line.served(line.published())
    line.sender.forget()
    line.version = 0
    line.published()
    with pytest.raises(BaseRefused):
        await line.load(line.published())
    await line.served(line.published(), full=True)


async def test_a_failed_canary_leaves_no_base(line: Line) -> None:
    await line.served(line.published())
    line.engine.fails = True
    with pytest.raises(CanaryFailed):
        await line.load(line.published())
    new = line.published()
    with pytest.raises(BaseRefused):
        await line.load(new)
    await line.served(new, full=True)


async def test_a_damaged_delta_changes_nothing_and_the_engine_takes_the_next(line: Line) -> None:
    await line.served(line.published())
    before, new = line.engine.model.content(), line.published()
    assert new.delta is not None
    digests = ("0" * 32, *new.delta.manifest.chunk_digests[1:])
    damaged = msgspec.structs.replace(new.delta.manifest, chunk_digests=digests)
    delta = msgspec.structs.replace(new.delta, manifest=damaged)
    with pytest.raises(WeightSyncFailed, match=r"digest of chunk 0|sent bucket 0 \(.first\["):
        await line.load(msgspec.structs.replace(new, delta=delta))
    assert line.engine.model.content() == before
    await line.served(new)


def test_a_base_that_is_not_compared_is_caught_by_the_digests_of_the_chunks() -> None:
    """The comparison is the first guard; rebuilt chunks are verified as received ones are."""
    model, engine = TrainedModel(1), TrainedModel(7)
    sender = ObjectStoreSender(ModuleSource(model, CHUNK_BYTES), delta=True)
    other = sender.publish(1)
    model.step()
    sender.publish(2)
    model.step()
    new = sender.publish(3)
    assert new.delta is not None
    wrong = HeldRelease(new.delta.base, other.manifest, list(other.handles))
    receiver, before = ModuleReceiver(engine), engine.content()
    receiver.begin(1, new.manifest)
    with pytest.raises(TransferRefused, match="digest of chunk 0"):
        receiver.apply(1, 0, rebuilt(1, wrong, new.manifest, new.delta.chunks)[0])
    receiver.abort()
    assert engine.content() == before
