"""What died with a machine is replaced; the trainer and the engines that are well are left alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.controller.errors import BudgetSpent
from offbeat.controller.signal import Signal
from offbeat.messages.failures import PayloadLost, ReleaseLost, WeightSyncFailed
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt
from offbeat.messages.training import Chunk, ChunkResult, PreparedColumns
from offbeat.messages.weights import WeightRelease, WeightsAck
from tests.support.fakes import FakeGenerator, FakeTrainer
from tests.support.world import IN_ORDER, READY_FIRST, World

SAMPLERS = pytest.mark.parametrize("sampler", [READY_FIRST, IN_ORDER], ids=["ready", "in_order"])
DIED = "the machine that held it died"


@dataclass
class Bereft(FakeTrainer):
    """Is sent columns that are lost: those of these groups, so many times."""

    lost: Counter[int] = field(default_factory=Counter[int])

    def _check(self, chunk: Chunk, during: str) -> None:
        gone = tuple(each for each in chunk.prompt_indices if self.lost[each])
        self.lost.subtract(gone)
        if gone:
            raise PayloadLost(gone, during, DIED)

    def _accumulate(self, key: StepKey, chunk: Chunk) -> ChunkResult:
        self._check(chunk, "microbatch")
        return super()._accumulate(key, chunk)

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        self._check(chunk, "prepare_logprobs")
        return await super().prepare_logprobs(fence, chunk, loss)


@dataclass
class Spool:
    """Holds a copy of these groups, and knows of these that their payload is gone."""

    copies: set[int] = field(default_factory=set[int])
    known_lost: set[int] = field(default_factory=set[int])
    read: list[int] = field(default_factory=list[int])

    def readable(self, receipt: Receipt) -> object | None:
        if receipt.prompt_index not in self.copies:
            return None
        self.read.append(receipt.prompt_index)
        return object()

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        found = self.known_lost & payloads.keys()
        self.known_lost -= found
        return found


def world_of(lost: dict[int, int], spool: Spool | None = None, **overrides: Any) -> World:
    trainer = Bereft(lost=Counter(lost))
    return World(overrides, trainer=trainer, payloads=spool or Spool())


@SAMPLERS
@pytest.mark.parametrize("interval", [0, 1, 2])
def test_a_group_whose_columns_are_lost_is_rolled_out_again_and_no_rank_is_replaced(
    sampler: dict[str, Any], interval: int
) -> None:
    world = world_of({5: 1, 6: 1}, sampler=sampler, checkpoint={"interval": interval})
    world.run()
    world.assert_ledger_agrees()
    ledger = world.built.state.ledger
    assert sorted(world.trained) == list(range(40))
    assert ledger.totals.retried == {"payload_lost": 2}
    assert (world.trainer.incarnation_number, ledger.lineage) == (1, 0)
    assert len(world.rollouts.started) == 42, "only the lost groups were rolled out again"


@SAMPLERS
def test_columns_that_are_in_the_spool_are_read_again(sampler: dict[str, Any]) -> None:
    spool = Spool(copies={5, 6})
    world = world_of({5: 1, 6: 1}, spool, sampler=sampler)
    world.run()
    world.assert_ledger_agrees()
    assert sorted(spool.read) == [5, 6]
    assert sorted(world.trained) == list(range(40))
    assert len(world.rollouts.started) == 40, "no group was rolled out again"


@pytest.mark.parametrize("later_s", [0.5, 100.0], ids=["ready", "in flight"])
def test_a_lost_group_that_is_smaller_than_the_largest_gets_room_from_groups_of_later_steps(
    later_s: float,
) -> None:
    """Group 5 held 100 bytes, the new rollout may have 1000, and groups of step 3 have the rest."""
    world = world_of({5: 1}, sampler=IN_ORDER, buffer={"capacity_mib": 4600 / 2**20})
    world.rollouts.forged = {each: {"payload_bytes": 1000} for each in range(40) if each != 5}
    world.rollouts.slow = {7: 5.0, 8: later_s}
    world.run()
    ledger = world.built.state.ledger
    assert sorted(world.trained) == list(range(40))
    assert ledger.totals.retried == {"payload_lost": 1, "no_room": 1}


def test_columns_that_are_lost_once_more_after_they_were_read_again_are_rolled_out_again() -> None:
    spool = Spool(copies={5})
    world = world_of({5: 2}, spool)
    world.run()
    world.assert_ledger_agrees()
    assert spool.read == [5]
    assert world.built.state.ledger.totals.retried == {"payload_lost": 1}


def test_one_loss_has_all_that_is_held_looked_through() -> None:
    """Group 5 is found by the trainer, its neighbours by the store: one abort for all of them."""
    world = world_of({5: 1}, Spool(known_lost={6, 7}), sampler=IN_ORDER)
    world.run()
    world.assert_ledger_agrees()
    assert world.built.state.ledger.totals.retried == {"payload_lost": 3}
    assert len(world.trainer.aborted) == 1


def test_a_loss_takes_no_retry_from_a_step_that_fails() -> None:
    lost = {4: 1, 5: 1, 6: 1}
    world = world_of(lost, trainer={"step_retries": 0, "min_tokens_per_chunk": 1})
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40


def test_columns_may_be_lost_when_logprobs_are_prepared() -> None:
    world = world_of({5: 1})
    world.loss = LossSpec(ClippedPgLossConfig(old_logprobs="policy"))
    world.run()
    world.assert_ledger_agrees()
    assert world.built.state.ledger.totals.retried == {"payload_lost": 1}


def test_a_group_that_is_lost_again_and_again_ends_the_run_by_its_retries() -> None:
    world = world_of({5: 99}, rollout={"infrastructure_retries": 2})
    cause = world.fail().causes[0]
    assert isinstance(cause, BudgetSpent)
    assert "rollout.infrastructure_retries" in str(cause)
    assert DIED in str(cause)


@dataclass
class Deprived(FakeGenerator):
    """Is sent releases that are lost, so many times for each of these versions."""

    lost: Counter[int] = field(default_factory=Counter[int])

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        if self.lost[release.version]:
            self.lost[release.version] -= 1
            raise ReleaseLost(self.name, release.version, DIED)
        return await super().load_weights(fence, epoch, release)


@dataclass
class Publisher(FakeTrainer):
    """Remembers which versions it published."""

    published: list[int] = field(default_factory=list[int])
    appended: Signal = field(default_factory=Signal)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        release = await super().publish_weights(fence, version)
        self.published.append(version)
        self.appended.notify()
        return release


@dataclass
class Late(FakeGenerator):
    """Fails its first transfer of each version; the next one ends when a newer release is published."""

    trainer: Publisher = field(default_factory=Publisher)
    until: int = 0  # the version from which on it takes every release
    missed: int = 0
    asked: Counter[int] = field(default_factory=Counter[int])

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        self.asked[release.version] += 1
        if release.version in (0, self.until) or release.version > self.until:
            return await super().load_weights(fence, epoch, release)
        if self.asked[release.version] == 1:
            raise WeightSyncFailed(self.name, epoch, release.version, "torn")
        newer = self.trainer.appended.wait_for(lambda: self.trainer.published[-1] > release.version)
        await newer
        self.missed += 1
        raise ReleaseLost(self.name, release.version, "the sender holds another release by now")


def deprived(lost: dict[str, dict[int, int]], **overrides: Any) -> tuple[World, Publisher]:
    trainer = Publisher()
    world = World(overrides, trainer=trainer)
    for name, versions in lost.items():
        world.generators[name] = Deprived(name, lost=Counter(versions))
    return world, trainer


@SAMPLERS
@pytest.mark.parametrize("mode", ["keep", "drain"])
@pytest.mark.parametrize("victims", [1, 2])
def test_weights_that_are_lost_on_their_way_are_published_again_and_no_engine_is_replaced(
    sampler: dict[str, Any], mode: str, victims: int
) -> None:
    lost = {f"generator-{index}": {3: 1, 6: 2} for index in range(victims)}
    world, trainer = deprived(lost, sampler=sampler, sync={"mode": mode})
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    if victims == 2:  # nobody took it, so nothing newer could come first
        assert trainer.published.count(3) == 2
    assert trainer.published == sorted(trainer.published)
    assert (trainer.incarnation_number, world.built.state.ledger.lineage) == (1, 0)
    assert [each.restarts for each in world.generators.values()] == [0, 0]
    assert world.worst_staleness() <= 2


def test_weights_that_are_lost_each_time_are_the_fault_of_the_trainers_machine() -> None:
    lost = {3: 2, 4: 2}
    world, trainer = deprived(
        {f"generator-{index}": lost for index in range(2)}, checkpoint={"interval": 2}
    )
    world.run()
    world.assert_ledger_agrees()
    assert (trainer.incarnation_number, world.built.state.ledger.lineage) == (2, 1)
    assert [each.restarts for each in world.generators.values()] == [0, 0]


def test_an_engine_that_is_too_late_for_each_release_is_not_replaced() -> None:
    trainer = Publisher()
    world = World({}, trainer=trainer)
    late = Late("generator-0", trainer=trainer, until=8)
    world.generators["generator-0"] = late
    world.run()
    world.assert_ledger_agrees()
    assert late.missed > 3, "as many as would replace an engine that is at fault"
    assert late.restarts == 0
    assert trainer.incarnation_number == 1
