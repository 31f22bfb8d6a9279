"""Computes figures for the display, the summary and the utilization metrics.

Also estimates the median of a stream of any length, in bounded memory.
"""

import platform
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Final, Literal

import msgspec

from offbeat.controller.events import Spent
from offbeat.controller.pending_waits import Pump
from offbeat.controller.run_stats import summarize
from offbeat.controller.state import RunState
from offbeat.controller.stats_records import RunTotals
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.doors import find_installed_version
from offbeat.messages.failures import Component
from offbeat.telemetry.applied_steps import WINDOW_STEPS
from offbeat.telemetry.status_file import Status
from offbeat.telemetry.summary import Summary, Syncs
from offbeat.telemetry.time_accounting import (
    GeneratorTime,
    TrainerTime,
    busy_metrics,
    verdict,
)

SAMPLE_SIZE: Final = 4096
"""Values kept from a stream. Their median's rank is off by less than 2.5 % (three sigma)."""


class Reservoir:
    """Keeps all values of a short stream, and an even random sample of a long one (algorithm R)."""

    def __init__(self, size: int = SAMPLE_SIZE) -> None:
        self._size = size
        self._sample = list[float]()
        self._rng = random.Random(0)
        self.count = 0
        """Number of values seen."""

    def add(self, value: float) -> None:
        """Add the next value."""
        self.count += 1
        if len(self._sample) < self._size:
            self._sample.append(value)
            return
        place = self._rng.randrange(self.count)
        if place < self._size:
            self._sample[place] = value

    def median(self) -> float:
        """Return the median of the stream: exact up to ``size`` values, an estimate beyond.

        Raises:
            statistics.StatisticsError: The stream is empty.
        """
        return statistics.median(self._sample)


class Progress:
    """Computes figures from the state and the measurements of each step. It decides nothing."""

    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        totals = state.journal.stats.totals  # of the incarnations before this one
        self._wall_before_s, self._serving_before_s = totals.wall_s, totals.serving_s
        self._first_step_s = totals.first_step_s
        self._pauses_s, self._transfers_s = Reservoir(), Reservoir()  # of syncs
        self._sync_bytes = 0  # of the last sync
        self._started_at = clock()
        self._ended_at: float | None = None
        self._last: Mapping[str, float] = {}  # metrics of the last step; empty before any
        self._verdict = ""
        self._has_rewards = state.config.environment.name != "demonstrations"
        self._is_taught = state.config.algorithm.loss.teacher_path is not None
        self._steps_with_signal = 0
        self._refused_samples = 0
        # Mean rewards of the last steps, by environment
        self._by_environment = defaultdict[str, deque[float]](_last_steps)

    def ended(self) -> None:
        self._ended_at = self._clock()

    def step_done(self, measures: StepMetricsBuilder) -> Mapping[str, float]:
        """Add one step, including its weight sync. Return its metrics."""
        if self._first_step_s is None:
            self._first_step_s = self._wall_s()
        if measures.sync is not None:
            self._pauses_s.add(measures.sync.pause_s)
            self._transfers_s.add(measures.sync.transfer_s)
            self._sync_bytes = measures.sync.nbytes
        self._steps_with_signal += measures.has_signal
        self._refused_samples += sum(each.refused_samples for each in measures.receipts)
        for name, rewards in measures.rewards_by_environment().items():
            self._by_environment[name].append(fmean(rewards))
        self._last = {**measures.metrics(), **self._busy_metrics(measures)}
        return self._last

    def _busy_metrics(self, measures: StepMetricsBuilder) -> dict[str, float]:
        trainer, engines = self._state.observer.times.lap()
        generate_s, reward_s = (
            measures.compute_mean("generate_s"),
            measures.compute_mean("reward_s"),
        )
        spent = Spent(
            trainer=trainer,
            engines=engines,
            generate_s=generate_s,
            reward_s=reward_s,
            syncs=int(measures.sync is not None),
        )
        self._state.ledger.note(spent)
        self._verdict = verdict(trainer, engines, generate_s=generate_s, reward_s=reward_s)
        return busy_metrics(trainer, engines)

    def status(self) -> Status:
        """Return the run's present status."""
        state, ledger, seen = self._state, self._state.ledger, self._last
        shares = self._state.observer.times.shares()
        serving_s, steps = self._serving_s(), ledger.trainer_version
        state.incidents.observe_outage(state.outage, state.step)
        staleness_max = seen.get("off_policy/staleness_max")
        return Status(
            step=ledger.trainer_version,
            steps=state.config.steps,
            phase=state.lifecycle.phase,
            reward=ledger.steps.last if self._has_rewards else None,
            reward_recent=ledger.steps.recent if self._has_rewards else (),
            loss=None if self._has_rewards else seen.get("train/loss"),
            staleness_mean=seen.get("off_policy/staleness_mean"),
            staleness_max=None if staleness_max is None else int(staleness_max),
            ready=len(ledger.ready),
            in_flight=ledger.in_flight,
            trainer_busy=shares[0].get(TrainerTime.COMPUTE),
            generator_busy=shares[1].get(GeneratorTime.COMPUTE),
            samples_per_s=state.journal.stats.totals.samples / serving_s if serving_s > 0 else None,
            verdict=self._verdict,
            waiting_for=self._waiting_for(),
            waits=state.waits.named(),
            elapsed_s=self._wall_s(),
            left_s=serving_s / steps * (state.config.steps - steps) if steps else None,
            scores=dict(state.scores.rewards),
            scored_version=state.scores.version,
            incidents=state.incidents.newest,
        )

    def _waiting_for(self) -> str:
        """Describe what the run waits for: with no engine or no worker, for the start of one."""
        state = self._state
        train = state.waits.describe_wait(Pump.TRAIN)
        if train and not state.fleet.is_serving:
            train = state.waits.oldest(Component.ENGINE) or train
        elif train and len(state.costs.lost_workers) >= state.config.environment.workers:
            train = f"a new process of {min(state.costs.lost_workers)} (all workers are lost)"
        return state.outage.describe() or train or state.waits.oldest()

    def summary(
        self,
        run_id: str,
        outcome: Literal["finished", "aborted", "failed"],
        error: str | None,
    ) -> Summary:
        """Return the run's summary, however the run ended.

        It combines sums over the events with loss, syncs and failed evaluations, which no event
        contains.
        """
        state, ledger = self._state, self._state.ledger
        rest = state.observer.times.lap()  # since the last step
        state.ledger.note(Spent(trainer=rest[0], engines=rest[1]))
        folded = summarize(
            ledger,
            self._totals(),
            run_id=run_id,
            name=state.config.name,
            steps_asked=state.config.steps,
            outcome=outcome,
            error=error,
        )
        rewards = ledger.steps if self._has_rewards else None
        return msgspec.structs.replace(
            folded,
            ended_by=state.operator.ended_by
            if outcome == "finished" and folded.steps < folded.steps_asked
            else "",
            reward_first=None if rewards is None else rewards.mean_first(ledger.trainer_version),
            reward_last=None if rewards is None else rewards.mean_last(ledger.trainer_version),
            loss=self._last.get("train/loss"),
            steps_with_signal=self._steps_with_signal
            if self._has_rewards and not self._is_taught
            else None,
            refused_samples=self._refused_samples,
            reward_by_environment={
                name: fmean(rewards) for name, rewards in sorted(self._by_environment.items())
            },
            syncs=self._syncs(),
            evaluations_failed=state.evaluation.failed_count,
            evaluation_failure=state.evaluation.failure,
            controller_incarnations=state.fence.incarnation,
            versions=_versions(),
        )

    def _totals(self) -> RunTotals:
        """Return the totals of all incarnations, timing this one by its own clock."""
        return msgspec.structs.replace(
            self._state.journal.stats.totals,
            wall_s=self._wall_s(),
            serving_s=self._serving_s(),
            first_step_s=self._first_step_s,
        )

    def _syncs(self) -> Syncs | None:
        if not self._pauses_s.count:
            return None
        return Syncs(
            count=self._state.costs.syncs,
            pause_s=self._pauses_s.median(),
            transfer_s=self._transfers_s.median(),
            nbytes=self._sync_bytes,
        )

    def _now(self) -> float:
        return self._clock() if self._ended_at is None else self._ended_at

    def _wall_s(self) -> float:
        """Return the wall time of all incarnations."""
        return self._wall_before_s + self._now() - self._started_at

    def _serving_s(self) -> float:
        """Return the time in which engines have served weights, over all incarnations."""
        since = self._state.lifecycle.running_since
        return self._serving_before_s + (0.0 if since is None else self._now() - since)


def _last_steps() -> deque[float]:
    return deque(maxlen=WINDOW_STEPS)


def _versions() -> dict[str, str]:
    """Return the installed versions of the libraries that the run uses."""
    packages = ("offbeat", "ray", "torch", "transformers")
    found = {"python": platform.python_version()} | {p: find_installed_version(p) for p in packages}
    return {name: version for name, version in found.items() if version is not None}
