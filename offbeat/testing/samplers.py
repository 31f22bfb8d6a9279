"""Prove a staleness policy by random moves of a run: no loop, no clock, no engine."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.controller.events import ReturnKind
from offbeat.messages.failures import FixableError
from offbeat.sampler.custom import load_custom
from offbeat.testing.algorithms import name_of
from offbeat.testing.sampler_bench import ENGINES, SamplerBench

MOVES: Final = 200
"""Moves of one run before it goes on without failures."""

FAILURES: Final = 0.1
"""Share of moves that are failures, and among these of losses of the trainer."""

STEPS_AFTER: Final = 12
"""Steps that must follow without failures."""

ROUNDS: Final = 8
"""Rounds in which a step must be full: in each, everything that can happen does."""


class SamplerRefused(FixableError):
    """A policy with which a run would stall, or exceed what it says it admits."""

    form = "{}: {}. {}"


def prove_sampler(
    sampler: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    groups_per_step: int = 3,
    max_staleness: int = 2,
    runs: int = 200,
) -> None:
    """Prove that runs with a policy stay within the bound and never stall.

    Groups are dispatched, finished, lost, retried and evicted in random order, engines get new
    weights one by one, and the trainer is lost and restored. Each answer of the policy is checked as
    a run checks it. Then failures end, and every step must become full.

    Args:
        sampler: What ``sampler.target`` would name.
        options: As in ``sampler.options``.
        groups_per_step: Of the runs.
        max_staleness: Of the runs [weight versions].
        runs: Random runs; run N has seed N.

    Raises:
        SamplerNotLoaded: It cannot be created.
        SamplerBroken: It returns what no run can follow.
        SamplerRefused: A run stalls, or has more groups than ``max_outstanding_groups``.
    """
    target = name_of(sampler)
    config = CustomSamplerConfig(
        target=target, max_staleness=max_staleness, options=dict(options or {})
    )
    for seed in range(runs):
        policy = load_custom(config, groups_per_step, Path.cwd())
        run = _Run(SamplerBench(policy, groups_per_step), random.Random(seed))
        for _ in range(MOVES):
            run.move()
            if run.outstanding > policy.max_outstanding_groups and not run.was_rewound:
                problem = (
                    f"run {seed}: {run.outstanding} groups are admitted and not trained, its "
                    f"max_outstanding_groups is {policy.max_outstanding_groups}"
                )
                raise SamplerRefused(target, problem, "Let admit return None when they are reached")
        for step in range(STEPS_AFTER):
            if not run.completes_a_step():
                raise SamplerRefused(target, f"run {seed}: {run.stalled(step)}", _STALL_FIX)


_STALL_FIX: Final = "Let admit draw a group when the step lacks one, and select return ready groups within the bound"


class _Run:
    """A run that moves at random."""

    def __init__(self, bench: SamplerBench, draw: random.Random) -> None:
        self._bench, self._draw = bench, draw
        self.was_rewound = False  # after that, groups return which the policy admitted long ago

    @property
    def outstanding(self) -> int:
        return self._bench.view.outstanding + len(self._bench.ledger.training)

    def move(self) -> None:
        """Make one move that is possible."""
        bench, draw = self._bench, self._draw
        moves = [self._admit, self._dispatch, self._serve, self._sweep, bench.claim]
        if bench.in_flight:
            moves += [self._commit, self._commit]
        if draw.random() < FAILURES:
            moves = [self._retry] if bench.in_flight else moves
            moves = [self._abort] if bench.ledger.training else moves
            moves = [self._rewind] if bench.trainer_version and draw.random() < FAILURES else moves
        draw.choice(moves)()

    def completes_a_step(self) -> bool:
        """Let everything happen that can, for some rounds; return whether a step was trained."""
        before = self._bench.trainer_version
        for _ in range(ROUNDS):
            self._bench.round()
            if self._bench.trainer_version > before:
                return True
        return False

    def stalled(self, step: int) -> str:
        """Return what a step lacks."""
        view = self._bench.view
        return (
            f"step {self._bench.trainer_version + 1} is never full, {step} steps after the last "
            f"failure: it needs {view.groups_needed} groups, {len(view.ready)} are ready, {view.waiting} wait"
        )

    def _admit(self) -> None:
        for _ in range(self._draw.randint(1, 4)):
            self._bench.admit(self._draw.randrange(ENGINES))

    def _dispatch(self) -> None:
        if group := self._bench.due():
            self._bench.dispatch(group, self._draw.randrange(ENGINES))

    def _serve(self) -> None:
        self._bench.serve(self._draw.randrange(ENGINES))

    def _sweep(self) -> None:
        self._bench.evict()
        late = self._bench.sampler.in_flight_to_cancel(self._bench.view, predictive=True)
        self._bench.cancel(late)

    def _commit(self) -> None:
        group = self._draw.choice(self._bench.in_flight)
        self._bench.commit(group, begun_late=self._draw.random() < 0.5)  # noqa: PLR2004 -- a coin

    def _retry(self) -> None:
        group = self._draw.choice(self._bench.in_flight)
        self._bench.ledger.retry(group.prompt_index, ReturnKind.INFRASTRUCTURE, "engine_lost")

    def _abort(self) -> None:
        self._bench.ledger.unclaim(self._bench.trainer_version + 1, 1)

    def _rewind(self) -> None:
        self.was_rewound = True
        self._bench.rewind(max(0, self._bench.trainer_version - self._draw.randint(1, 3)))
