"""Whole runs on fakes in which faults strike at chosen times, and the faulty fakes they need."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from offbeat.controller.errors import RunFailed
from offbeat.controller.events import AnyEvent
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import NoPayloads
from offbeat.controller.run_stats import RunStats
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.weights import WeightRelease, WeightsAck
from tests.support.fakes import FakeGenerator, FakeRollouts, infrastructure
from tests.support.virtual_time import run
from tests.support.world import World

G = TypeVar("G", bound=FakeGenerator)
R = TypeVar("R", bound=FakeRollouts)
Timed = tuple[float, Callable[[], object]]
"""A time in seconds since the start of the run, and what happens then."""

SAMPLERS: Final[dict[str, dict[str, Any]]] = {
    "in_order": {"name": "in_order", "max_staleness": 2},
    "weight_fifo": {"name": "weight_fifo", "max_staleness": 2},
    "ready_first": {"name": "ready_first", "max_staleness": 2},
    "windowed": {"name": "windowed", "max_staleness": 2, "over_sampling_ratio": 1.5},
    "fresh": {
        "name": "windowed",
        "max_staleness": 1,
        "over_sampling_ratio": 2.0,
        "freshest_first": True,
    },
    "sync": {"name": "in_order", "max_staleness": 0},
}
EVERY_SAMPLER: Final = tuple(SAMPLERS)


# --- runs ------------------------------------------------------------------------------------------


def play(world: World, *timed: Timed) -> float:
    """Run to the end while these actions happen at these times; returns the seconds it took."""
    error, at_s = outcome(world, *timed)
    if error is not None:
        raise error
    return at_s


def outcome(world: World, *timed: Timed) -> tuple[RunFailed | None, float]:
    """Run while these actions happen; returns the error that ended the run, if any, and when."""
    return run(_outcome(world, timed))


async def _outcome(world: World, timed: Iterable[Timed]) -> tuple[RunFailed | None, float]:
    loop = asyncio.get_running_loop()
    for at_s, action in timed:
        loop.call_later(at_s, action)
    try:
        await world.controller().run()
    except RunFailed as error:
        return error, loop.time()
    return None, loop.time()


def use_rollouts(world: World, rollouts: R) -> R:
    """Give the world other environment workers."""
    rollouts.engines = world.generators
    world.rollouts = rollouts
    return rollouts


def use_engine(world: World, engine: G) -> G:
    """Replace the world's engine of that name."""
    world.generators[engine.name] = engine
    world.rollouts.engines = world.generators
    return engine


def next_incarnation(
    before: World,
    overrides: dict[str, Any],
    known_records: int | None = None,
    *,
    payloads: "SurvivingPayloads | None" = None,
    incarnation: int = 2,
    engines: int = 2,
) -> World:
    """Return a world whose controller takes over from the one of ``before``.

    It knows the first ``known_records`` records of the journal; all of them by default. Trainer and
    engines live on.
    """
    known = cast("list[AnyEvent]", before.journal.events[:known_records])
    world = World(overrides, ledger=Ledger.fold(known), incarnation=incarnation, engines=engines)
    world.trainer, world.generators = before.trainer, before.generators
    world.trainer.turn = asyncio.Lock()  # the former one belongs to another event loop
    world.rollouts.engines = before.generators
    world.rollouts.slow = before.rollouts.slow
    world.prompts = before.prompts
    world.payloads = payloads or world.payloads
    world.journal.events, world.journal.stats = list(known), RunStats.fold(known)
    return world


# --- failures --------------------------------------------------------------------------------------


def reward_failure(prompt_index: int) -> RolloutFailed:
    """Return a data failure: the reward function raised."""
    return RolloutFailed(FailureKind.DATA, prompt_index, 1, "reward_raised", "said the test")


def aborted_generation(prompt_index: int) -> RolloutFailed:
    """Return an infrastructure failure: the engine gave the generation up."""
    return RolloutFailed(
        FailureKind.INFRASTRUCTURE, prompt_index, 1, "generation_aborted", "said the test"
    )


# --- fakes with faults -----------------------------------------------------------------------------


@dataclass
class SurvivingPayloads(NoPayloads):
    """Payloads that outlive their controller: those of the prompt indices that ``keep`` names."""

    keep: Callable[[int], bool] = lambda prompt_index: True
    requested: list[int] = field(default_factory=list[int])

    def readable(self, receipt: Receipt) -> object | None:
        self.requested.append(receipt.prompt_index)
        return object() if self.keep(receipt.prompt_index) else None


@dataclass
class PoisonedRollouts(FakeRollouts):
    """Prompts of ``kills`` kill the engine they are sent to; those of ``hangs`` never answer."""

    engines: Mapping[str, FakeGenerator] = field(default_factory=dict[str, FakeGenerator])
    kills: tuple[int, ...] = ()
    hangs: tuple[int, ...] = ()

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        if task.prompt_index in self.hangs:
            self.started.append((task.prompt_index, task.attempt))
            await asyncio.Event().wait()
        if task.prompt_index in self.kills:
            self.started.append((task.prompt_index, task.attempt))
            await asyncio.sleep(0.5)
            self.engines[task.engine].die()
            raise infrastructure(task, "engine_lost")
        return await super().rollout(fence, task)


@dataclass
class DiesAfterSync(FakeGenerator):
    """Engine that starts, takes weights, and dies a moment later, every time."""

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        ack = await super().load_weights(fence, epoch, release)
        asyncio.get_running_loop().call_later(0.2, self.die)
        return ack
