"""Engines that die, pause, or serve badly, in whole runs. Cases of NeMo-RL's chaos test of a fleet."""

import asyncio
import random
import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.config.limits import start_deadline_s
from offbeat.controller.commands import Pause, Resume
from offbeat.controller.engine_record import Health
from offbeat.controller.errors import EngineBudgetSpent, EngineNotStarted, RunFailed
from offbeat.controller.events import EngineLost, Returned, Served
from offbeat.messages.failures import Component, DeadlineExceeded
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from tests.support.fakes import FakeGenerator, FakeRollouts, FakeTrainer
from tests.support.scenarios import (
    SAMPLERS,
    DiesAfterSync,
    outcome,
    play,
    use_engine,
    use_rollouts,
)
from tests.support.world import World

Service = tuple[str, str, int | None, str | None]
"""Engine, process incarnation, version and digest."""


@dataclass
class RecordingRollouts(FakeRollouts):
    """Records what every engine serves at the moment a request reaches it."""

    served: list[Service] = field(default_factory=list[Service])

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        engine = self.engines[task.engine]
        if not engine.dead:
            self.served.append((engine.name, engine.incarnation, engine.version, engine.digest))
        return await super().rollout(fence, task)


@dataclass
class EngineOfALostNode(FakeGenerator):
    """Engine that never comes back once it died: its node is gone."""

    def die(self) -> None:
        self.dead, self.version, self.digest = True, None, None


@dataclass
class EngineOfACutMachine(FakeGenerator):
    """Engine from which nothing is heard any more once ``cut`` is set: not even that it is lost."""

    cut: bool = False

    async def _answer(self, incarnation_number: int | None = None) -> None:
        await never_if(self.cut)
        await super()._answer(incarnation_number)

    async def restart(self) -> None:
        if not self.cut:
            await super().restart()


@dataclass
class RolloutsAcrossACut(FakeRollouts):
    """Workers that wait for an engine of a machine that is cut off."""

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        answer = await super().rollout(fence, task)
        engine = self.engines[task.engine]
        await never_if(isinstance(engine, EngineOfACutMachine) and engine.cut)
        return answer


async def never_if(cut: bool) -> None:
    """Never return across a cut."""
    if cut:
        await asyncio.Event().wait()


@dataclass
class HangsInTransfer(FakeGenerator):
    """Engine that answers probes and requests; a transfer to it never ends, from ``after`` on."""

    after: int = 1
    transfers: int = 0

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        self.transfers += 1
        if self.transfers > self.after:
            await asyncio.Event().wait()
        return await super().load_weights(fence, epoch, release)


@dataclass
class PausingEngine(FakeGenerator):
    """Engine that answers nothing for ``pause_s``, then goes on: a compilation, a collection."""

    pause_s: float = 12.0
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def pause(self) -> None:
        self.silent = True
        asyncio.get_running_loop().call_later(self.pause_s, self._resume)

    def _resume(self) -> None:
        self.silent = False
        self.resumed.set()

    async def _answer(self, incarnation_number: int | None = None) -> None:
        if self.silent:
            waits = [asyncio.ensure_future(event.wait()) for event in (self.killed, self.resumed)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        await super()._answer(incarnation_number)


@pytest.mark.parametrize("moment_s", [0.2, 0.7, 3.3, 5.0, 6.1])
def test_losing_the_only_engine_for_good_ends_the_run_soon_and_by_name(moment_s: float) -> None:
    world = World(engines=1)
    engine = use_engine(world, EngineOfALostNode("generator-0"))
    error, at_s = outcome(world, (moment_s, engine.die))
    assert isinstance(error, RunFailed)
    assert "generator-0" in str(error)
    assert at_s < start_deadline_s(world.config.generator) + 40


def test_the_status_names_the_engine_whose_start_the_run_waits_for() -> None:
    world, seen = World(engines=1), list[str]()
    engine = use_engine(world, EngineOfALostNode("generator-0"))
    outcome(
        world,
        (3.3, engine.die),
        (30.0, lambda: seen.append(world.built.progress.status().waiting_for)),
    )
    (text,) = seen
    assert text.endswith(" (start of generator-0)")


def test_the_death_of_an_idle_engine_is_noticed() -> None:
    world = World(engines=1)
    play(
        world,
        (4.0, lambda: world.built.control(Pause())),
        (60.0, world.generators["generator-0"].die),
        (80.0, lambda: world.built.control(Resume())),
    )
    world.assert_ledger_agrees()
    assert world.generators["generator-0"].incarnation_number == 2


@pytest.mark.parametrize("mode", ["keep", "drain"])
@pytest.mark.parametrize("seed", range(12))
def test_no_engine_serves_what_no_sync_has_given_it(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    config = {"steps": 12, "sync": {"mode": mode}, "generator": {"restart_budget": 99}}
    world = World(config, engines=3)
    rollouts = use_rollouts(world, RecordingRollouts(world.generators))
    engines = list(world.generators.values())
    for engine in engines:
        engine.load_s = rng.choice([0.1, 0.8, 2.5])
    play(world, *((rng.uniform(0.5, 40), rng.choice(engines).die) for _ in range(8)))
    world.assert_ledger_agrees()
    acked = {
        (each.engine, each.incarnation, each.version, each.digest) for each in world.events(Served)
    }
    assert {each for each in rollouts.served if each[2] is not None} <= acked


@pytest.mark.parametrize("name", ["ready_first", "in_order"])
@pytest.mark.parametrize("tenths", range(60, 100, 3))
def test_a_death_around_a_drained_sync_leaves_the_gate_open(name: str, tenths: int) -> None:
    world = World({"sync": {"mode": "drain"}, "sampler": SAMPLERS[name]}, engines=2)
    first, second = world.generators.values()
    first.load_s = 1.5
    play(world, (tenths / 10, first.die), (tenths / 10 + 0.4, second.die))
    world.assert_ledger_agrees()
    assert len(world.trained) == 40


def test_a_failed_sync_moves_no_version_backwards_and_the_others_serve() -> None:
    world = World({"generator": {"restart_budget": 99}}, engines=3)
    world.generators["generator-2"].refuse_loads = 2
    play(world)
    world.assert_ledger_agrees()
    assert {engine.version for engine in world.generators.values()} == {10}


# --- an engine that pauses -------------------------------------------------------------------------


@pytest.mark.parametrize("pause_s", [5.0, 12.0])
def test_an_engine_that_misses_one_probe_keeps_its_process(pause_s: float) -> None:
    world = World({"steps": 20})
    engine = use_engine(world, PausingEngine("generator-1", pause_s=pause_s))
    play(world, (6.0, engine.pause))
    assert engine.restarts == 0


def test_an_engine_that_misses_a_probe_is_given_no_work_meanwhile() -> None:
    world = World({"steps": 20})
    engine = use_engine(world, PausingEngine("generator-1", pause_s=18.0))
    seen = list[Health]()
    play(
        world,
        (6.0, engine.pause),
        (19.0, lambda: seen.append(world.built.state.fleet.engines["generator-1"].health)),
    )
    assert seen == [Health.SUSPECT]
    assert engine.restarts == 0


@pytest.mark.parametrize(
    ("settings", "replaced_within_s"),
    [({}, 24), ({"probe_strikes": 1}, 14), ({"probe_deadline_s": 3, "probe_interval_s": 1}, 9)],
)
def test_a_silent_engine_is_replaced_after_as_many_probes_as_the_recipe_allows(
    settings: dict[str, Any], replaced_within_s: float
) -> None:
    world = World({"steps": 30, "generator": settings})
    engine = world.generators["generator-1"]
    replaced = list[int]()
    play(
        world,
        (6.0, lambda: setattr(engine, "silent", True)),
        (6.0 + replaced_within_s - 5, lambda: replaced.append(engine.restarts)),
        (6.0 + replaced_within_s, lambda: replaced.append(engine.restarts)),
    )
    assert replaced == [0, 1]


# --- a machine that is cut off: nobody reports that its engine is lost -----------------------------

PATIENT = {"steps": 30, "sync": {"deadline_s": 900.0}, "rollout": {"deadline_s": 900.0}}
PROBED_S = 2 + 2 * 10  # until an engine that answers nothing is given up


def across_a_cut(settings: dict[str, Any], engine: EngineOfACutMachine) -> World:
    world = World({**PATIENT, **settings}, engines=3)
    use_rollouts(world, RolloutsAcrossACut(world.generators))
    use_engine(world, engine)
    return world


@pytest.mark.parametrize("mode", ["keep", "drain"])
@pytest.mark.parametrize("name", ["in_order", "ready_first"])
@pytest.mark.parametrize("cut_at_s", [6.0, 6.7, 7.4])
def test_the_others_go_on_as_soon_as_an_engine_of_a_cut_machine_is_given_up(
    cut_at_s: float, name: str, mode: str
) -> None:
    settings: dict[str, Any] = {"sampler": SAMPLERS[name]}
    settings["sync"] = {**PATIENT["sync"], "mode": mode}  # type: ignore[dict-item]
    usual_s = play(across_a_cut(settings, EngineOfACutMachine("generator-0")))
    engine = EngineOfACutMachine("generator-0")
    world = across_a_cut(settings, engine)
    took_s = play(world, (cut_at_s, lambda: setattr(engine, "cut", True)))
    world.assert_ledger_agrees()
    assert len(world.trained) == 120
    assert took_s - usual_s <= PROBED_S + 15


def test_an_engine_that_is_cut_off_while_it_catches_up_keeps_no_lock_from_the_others() -> None:
    usual_s = play(across_a_cut({}, EngineOfACutMachine("generator-0")))
    engine = EngineOfACutMachine("generator-0")
    world = across_a_cut({}, engine)
    seen = list[Health]()

    def cut() -> None:
        seen.append(world.built.state.fleet.engines["generator-0"].health)
        engine.cut = True

    play_s = play(
        world, (6.0, engine.die), (6.5, lambda: setattr(engine, "load_s", 9.0)), (9.5, cut)
    )
    assert seen == [Health.STALE], "it was loading weights"
    world.assert_ledger_agrees()
    assert play_s - usual_s <= PROBED_S + 15


def test_groups_of_an_engine_that_is_given_up_cost_a_retry_and_are_rolled_out_elsewhere() -> None:
    engine = EngineOfACutMachine("generator-0")
    world = across_a_cut({}, engine)
    world.rollouts.slow = {3: 20.0}
    play(world, (6.0, lambda: setattr(engine, "cut", True)))
    lost, *_ = world.events(EngineLost)
    events = world.journal.events
    after = [each for each in events[events.index(lost) :] if isinstance(each, Returned)]
    assert after
    assert {each.reason for each in after} == {"engine_lost"}


# --- engines that cannot be kept -------------------------------------------------------------------


def test_a_run_goes_on_with_the_survivors_of_a_lost_node() -> None:
    generator = {"start_deadline_s": 10, "restart_budget": 3}
    world = World({"steps": 100, "generator": generator}, engines=3)
    engine = use_engine(world, EngineOfALostNode("generator-0"))
    play(world, (5.0, engine.die))
    world.assert_ledger_agrees()
    assert len(world.trainer.steps) == 100
    assert world.built.state.fleet.retired == ["generator-0"]


def test_an_engine_that_dies_after_every_start_is_retired_before_it_spends_the_budget_of_all() -> (
    None
):
    world = World({"steps": 100}, engines=3)
    use_engine(world, DiesAfterSync("generator-0"))
    play(world)
    assert len(world.trainer.steps) == 100
    assert world.generators["generator-0"].retired
    assert world.built.state.fleet.replaced <= world.config.generator.retire_after + 1


def test_an_engine_that_answers_requests_between_its_deaths_is_not_retired() -> None:
    world = World({"steps": 60}, engines=3)
    engine = world.generators["generator-0"]
    play(world, *((10.0 * n, engine.die) for n in range(1, 9)))
    assert engine.incarnation_number == 9
    assert world.built.state.fleet.retired == []


def test_no_more_engines_are_retired_than_leave_the_run_its_minimum() -> None:
    generator = {"start_deadline_s": 10, "restart_budget": 3, "min_engines": 2}
    world = World({"steps": 100, "generator": generator}, engines=2)
    use_engine(world, DiesAfterSync("generator-0"))
    error, _ = outcome(world)
    assert isinstance(error, RunFailed)
    assert "generator.restart_budget" in str(error)
    assert world.built.state.fleet.retired == []


def test_the_last_engine_is_restarted_as_often_as_the_budget_allows() -> None:
    world = World({"generator": {"restart_budget": 7}}, engines=1)
    engine = use_engine(world, DiesAfterSync("generator-0"))
    error, _ = outcome(world)
    assert isinstance(error, RunFailed)
    spent = error.causes[0]
    assert isinstance(spent, EngineBudgetSpent)
    assert re.match(r"generator-0 was lost again: generator-0 .*: the process is gone", str(spent))
    assert engine.incarnation_number == 1 + 7
    assert not engine.retired


@dataclass
class SlowToPublish(FakeTrainer):
    """Trainer whose first weights take longer than an engine may take to start."""

    first_publish_s: float = 60.0

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        if version == 0:
            await asyncio.sleep(self.first_publish_s)
        return await super().publish_weights(fence, version)


def test_an_engine_that_never_starts_does_not_end_a_run_whose_other_engine_waits_for_weights() -> (
    None
):
    world = World({"generator": {"start_deadline_s": 10}}, engines=2, trainer=SlowToPublish())
    use_engine(world, EngineOfALostNode("generator-0", dead=True))
    play(world)
    assert len(world.trained) == 40


def test_a_run_of_which_no_engine_ever_starts_ends_at_the_first_start_deadline() -> None:
    world = World({"generator": {"start_deadline_s": 10}}, engines=2)
    for name in list(world.generators):
        use_engine(world, EngineOfALostNode(name, dead=True))
    error, at_s = outcome(world)
    assert isinstance(error, RunFailed)
    assert isinstance(error.causes[0], EngineNotStarted)
    assert at_s == pytest.approx(10)


# --- transfers that hang ---------------------------------------------------------------------------

SYNC_DEADLINE = {"steps": 30, "sync": {"deadline_s": 30}}


def test_an_engine_that_always_hangs_in_transfers_delays_the_others_by_one_deadline() -> None:
    usual_s = play(World(SYNC_DEADLINE, engines=3))
    world = World(SYNC_DEADLINE, engines=3)
    use_engine(world, HangsInTransfer("generator-0", after=3))
    assert play(world) - usual_s <= 30 + 10
    world.assert_ledger_agrees()


def test_an_engine_slower_than_the_steps_catches_up_after_its_late_transfer() -> None:
    """What it takes apart is not the current release any more when it has come."""
    world = World(SYNC_DEADLINE, engines=3)
    engine = world.generators["generator-0"]
    play(
        world,
        (6.0, lambda: setattr(engine, "load_s", 33.0)),
        (30.0, lambda: setattr(engine, "load_s", 20.0)),
    )
    world.assert_ledger_agrees()
    assert engine.restarts == 0
    assert engine.version == 30


def test_an_engine_that_always_hangs_in_transfers_is_retired_in_the_end() -> None:
    world = World({**SYNC_DEADLINE, "steps": 200}, engines=3)
    engine = use_engine(world, HangsInTransfer("generator-0", after=3))
    play(world)
    assert engine.retired
    assert len(world.trainer.steps) == 200


@dataclass
class ProbedGenerator(FakeGenerator):
    """An engine that counts the probes it is sent."""

    probes: int = 0

    async def state(self, fence: Fence) -> EngineState:
        self.probes += 1
        return await super().state(fence)


def test_the_engine_of_a_late_rollout_is_probed_at_once() -> None:
    def probes(faults: dict[int, list[Exception]]) -> int:
        world = World({"generator": {"probe_interval_s": 10_000.0}}, engines=1)
        engine = world.generators["generator-0"] = ProbedGenerator("generator-0")
        world.rollouts.engines = world.generators
        world.rollouts.faults = faults
        play(world)
        assert engine.restarts == 0
        return engine.probes

    late = DeadlineExceeded("rollout of g-000005", "environment-0", 30.0, Component.WORKER)
    assert probes({5: [late]}) == probes({}) + 1


def test_the_loss_of_an_engine_is_in_the_journal_before_its_return() -> None:
    world = World(engines=2)
    play(world, (4.0, world.generators["generator-0"].die))
    (lost,) = world.events(EngineLost)
    assert lost.engine == "generator-0"
    assert "generator-0" in lost.reason
    events = world.journal.events
    later = events[events.index(lost) :]
    assert any(isinstance(event, Served) and event.engine == lost.engine for event in later)
