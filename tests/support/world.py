"""A whole run on fakes and a virtual clock, for tests of the controller and of its pumps."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.errors import RunFailed
from offbeat.controller.failpoints import Failpoints, no_failpoints
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import NoPayloads, NoTrace, Payloads, Ports, Trace, no_cpu_clock
from offbeat.controller.recovery import GROUPS_PER_TURN
from offbeat.controller.train_step import Advantages
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.sampler.build import build_sampler
from tests.support.fakes import (
    FakeEvaluationLog,
    FakeGenerator,
    FakeRollouts,
    FakeTrainer,
    MemoryJournal,
    MemoryTelemetry,
)
from tests.support.virtual_time import run

E = TypeVar("E")

READY_FIRST: dict[str, Any] = {"name": "ready_first", "max_staleness": 2}
IN_ORDER: dict[str, Any] = {"name": "in_order", "max_staleness": 2}


@dataclass
class World:
    """One run on fakes."""

    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    prompts: FakePrompts = field(default_factory=FakePrompts)
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    engines: int = 2
    loss: LossSpec = field(default_factory=LossSpec)
    ledger: Ledger | None = None  # of a former controller
    incarnation: int = 1
    driver: str = ""
    payloads: Payloads = field(default_factory=NoPayloads)
    trace: Trace = field(default_factory=NoTrace)
    scored: FakePrompts | dict[str, FakePrompts] | None = None  # prompts of evaluations, by set
    scores: FakeEvaluationLog = field(default_factory=FakeEvaluationLog)
    reached: Failpoints = no_failpoints
    advantages: Advantages = lambda rewards, _valid: rewards
    advantages_within_s: float | None = None
    groups_per_turn: int = GROUPS_PER_TURN
    evaluates_only: bool = False
    spares_prompts: bool = False
    cpu_s: Callable[[], float] = no_cpu_clock

    def __post_init__(self) -> None:
        names = [f"generator-{index}" for index in range(self.engines)]
        self.generators = {name: FakeGenerator(name) for name in names}
        self.rollouts = FakeRollouts(self.generators)
        self.journal, self.telemetry = MemoryJournal(), MemoryTelemetry()
        base: dict[str, Any] = {
            "steps": 10,
            "groups_per_step": 4,
            "samples_per_group": 2,
            "model": {"path": "none"},
            "sampler": READY_FIRST,
            "supervision": {"stall_timeout_s": 100},
            "trainer": {"min_tokens_per_chunk": 1},
        }
        self.config = RunConfig.model_validate({**base, **self.overrides})

    def controller(self) -> Controller:
        config = self.config
        sets = {"": self.scored} if isinstance(self.scored, FakePrompts) else self.scored or {}
        self.built = Controller(
            config,
            Fence("run", self.incarnation),
            Ports(
                prompts=self.prompts,
                rollouts=self.rollouts,
                generators=self.generators,
                trainer=self.trainer,
                journal=self.journal,
                telemetry=self.telemetry,
                trace=self.trace,
                payloads=self.payloads,
                failpoints=self.reached,
                evaluation=sets,
                scores=self.scores,
                cpu_s=self.cpu_s,
            ),
            sampler=build_sampler(config.sampler, config.groups_per_step),
            advantages=self.advantages,
            advantages_within_s=self.advantages_within_s,
            loss=self.loss,
            max_group_bytes=1000,
            rng=random.Random(0),
            ledger=self.ledger,
            driver=self.driver,
            groups_per_turn=self.groups_per_turn,
            evaluates_only=self.evaluates_only,
            spares_prompts=self.spares_prompts,
        )
        return self.built

    async def go(self) -> None:
        await self.controller().run()

    def run(self) -> None:
        run(self.go())

    def fail(self) -> RunFailed:
        with pytest.raises(RunFailed) as failure:
            self.run()
        return failure.value

    @property
    def trained(self) -> list[int]:
        """Prompt indices by the trainer's own log."""
        return [prompt_index for step in self.trainer.steps for prompt_index in step]

    def worst_staleness(self) -> float:
        return max(record["off_policy/staleness_max"] for record in self.telemetry.records)

    def assert_ledger_agrees(self) -> None:
        """The ledger and the trainer's own log tell the same story; nothing is lost or doubled."""
        ledger = self.built.state.ledger
        counts = ledger.counts()
        live = sum(counts[place] for place in ("admitted", "in_flight", "ready", "training"))
        assert counts["drawn"] == live + counts["trained"] + sum(ledger.totals.dropped.values())
        assert len(self.trained) == len(set(self.trained)) == counts["trained"]
        assert ledger.trainer_version == len(self.trainer.steps)
        assert self.built.state.queue.bytes_held == 100 * (counts["ready"] + counts["training"])

    def events(self, kind: type[E]) -> list[E]:
        """What the journal has of one kind."""
        return [event for event in self.journal.events if isinstance(event, kind)]


def lost(prompt_index: int) -> RolloutFailed:
    return RolloutFailed(FailureKind.INFRASTRUCTURE, prompt_index, 1, "connection_lost", "reset")


def bad_data(prompt_index: int) -> RolloutFailed:
    return RolloutFailed(FailureKind.DATA, prompt_index, 1, "reward_nan", "reward is nan")
