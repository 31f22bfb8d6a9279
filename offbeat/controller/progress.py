"""Figures for the display, the summary and the utilization metrics."""

import contextlib
import platform
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean
from typing import Literal

from offbeat.controller.events import Spent
from offbeat.controller.history import History
from offbeat.controller.pending_waits import Pump
from offbeat.controller.state import RunState
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.messages.failures import Component
from offbeat.messages.groups import Receipt
from offbeat.telemetry.applied_steps import WINDOW_STEPS
from offbeat.telemetry.reservoir import Reservoir
from offbeat.telemetry.status import Status
from offbeat.telemetry.summary import GroupCounts, Summary, Syncs
from offbeat.telemetry.time_accounting import (
    GeneratorTime,
    TrainerTime,
    busy_metrics,
    verdict,
)


class Progress:
    """Computes figures from the state and the measures of each step; takes no decisions."""

    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self._state, self._clock = state, clock
        self._before = History()  # of the incarnations before this one
        self._samples = self._tokens = 0  # trained, over all incarnations
        self._masked_samples = 0  # of the groups trained
        self._pauses_s, self._transfers_s = Reservoir(), Reservoir()  # of syncs
        self._sync_bytes = 0  # of the last sync
        self._started_at = clock()
        self._ended_at: float | None = None
        self._first_step_s: float | None = None
        self._last: StepMetricsBuilder | None = None
        self._verdict = ""
        self._has_rewards = state.config.environment.name != "demonstrations"
        # Mean rewards of the last steps, by environment
        self._by_environment = defaultdict[str, deque[float]](_last_steps)

    def go_on_from(self, before: History) -> None:
        """Continue from the history of earlier incarnations."""
        self._before = before
        self._samples, self._tokens = before.samples, before.tokens
        self._masked_samples = before.masked_samples
        self._first_step_s = before.first_step_s
        self._state.tally = before.tally

    def taken_over(self, receipts: Sequence[Receipt]) -> None:
        """Count a former controller's last step, whose end is not in its journal."""
        self._samples += sum(len(receipt.valid_rewards) for receipt in receipts)
        self._masked_samples += sum(receipt.masked_samples for receipt in receipts)
        self._tokens += sum(receipt.tokens for receipt in receipts)

    def ended(self) -> None:
        self._ended_at = self._clock()

    def step_done(self, measures: StepMetricsBuilder) -> dict[str, float]:
        """Add one step, its weight sync included; return the utilization metrics."""
        if self._first_step_s is None:
            self._first_step_s = self._wall_s()
        self._last = measures
        if measures.sync is not None:
            self._pauses_s.add(measures.sync.pause_s)
            self._transfers_s.add(measures.sync.transfer_s)
            self._sync_bytes = measures.sync.nbytes
        self.taken_over(measures.receipts)
        for name, rewards in measures.rewards_by_environment().items():
            self._by_environment[name].append(fmean(rewards))
        return self._busy_metrics(measures)

    def _busy_metrics(self, measures: StepMetricsBuilder) -> dict[str, float]:
        trainer, engines = self._state.observer.times.lap()
        generate_s, reward_s = measures.mean_of("generate_s"), measures.mean_of("reward_s")
        spent = Spent(
            trainer=trainer,
            engines=engines,
            generate_s=generate_s,
            reward_s=reward_s,
            syncs=int(measures.sync is not None),
        )
        self._state.count(spent)
        self._verdict = verdict(trainer, engines, generate_s=generate_s, reward_s=reward_s)
        return busy_metrics(trainer, engines)

    def status(self) -> Status:
        """Return the run's present status."""
        state, ledger, last = self._state, self._state.ledger, self._last
        shares = self._state.observer.times.shares()
        seen = {} if last is None else last.metrics()
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
            samples_per_s=self._rate(self._samples),
            verdict=self._verdict,
            waiting_for=state.outage.describe()
            or state.waits.waits_of(Pump.TRAIN)
            or state.waits.oldest(),
            waits=state.waits.named(),
        )

    def summary(
        self,
        run_id: str,
        outcome: Literal["finished", "aborted", "failed"],
        error: str | None,
    ) -> Summary:
        """Return the run's summary, however it ended."""
        state, ledger = self._state, self._state.ledger
        trainer, engines, bottleneck = self._whole_run()
        restarts = state.tally.restarts
        staleness = ledger.steps.staleness
        rewards = ledger.steps if self._has_rewards else None
        return Summary(
            run_id=run_id,
            name=state.config.name,
            outcome=outcome,
            error=error,
            steps=ledger.trainer_version,
            steps_asked=state.config.steps,
            trainer_version=ledger.trainer_version,
            groups=GroupCounts(**ledger.counts(), dropped=dict(ledger.totals.dropped)),
            reward_first=None if rewards is None else rewards.first,
            reward_last=None if rewards is None else rewards.last,
            loss=None if self._last is None else self._last.metrics().get("train/loss"),
            reward_by_environment={
                name: fmean(rewards) for name, rewards in sorted(self._by_environment.items())
            },
            staleness_histogram=staleness,
            masked_samples=self._masked_samples,
            max_staleness_trained=max(staleness, default=0),
            wall_s=self._wall_s(),
            first_step_s=self._first_step_s,
            samples_per_s=self._rate(self._samples) or 0.0,
            tokens_per_s=self._rate(self._tokens) or 0.0,
            trainer_busy_fraction=trainer.pop(TrainerTime.COMPUTE, 0.0),
            generator_busy_fraction=engines.pop(GeneratorTime.COMPUTE, 0.0),
            trainer_waits=trainer,
            generator_waits=engines,
            verdict=bottleneck,
            syncs=self._syncs(),
            restarts=restarts.get(Component.ENGINE, 0),
            worker_restarts=restarts.get(Component.WORKER, 0),
            trainer_restarts=restarts.get(Component.TRAINER, 0),
            engines_retired=sorted(state.tally.retired),
            evaluations_failed=state.evaluation.failed_count,
            evaluation_failure=state.evaluation.failure,
            rewinds=ledger.lineage,
            controller_incarnations=state.fence.incarnation,
            resumes=self._before.resumes,
            weights_digest=ledger.digest,
            versions=_versions(),
        )

    def _whole_run(self) -> tuple[dict[str, float], dict[str, float], str]:
        """Return the time shares of trainer and engines over all incarnations, and the bottleneck.

        Empty without a step.
        """
        tally = self._state.tally
        steps = sum(tally.trainer_s.values())
        rest = self._state.observer.times.lap()  # since the last step
        self._state.count(Spent(trainer=rest[0], engines=rest[1]))
        return *tally.shares(), tally.verdict() if steps else ""

    def _syncs(self) -> Syncs | None:
        if not self._pauses_s.count:
            return None
        return Syncs(
            count=self._state.tally.syncs,
            pause_s=self._pauses_s.median(),
            transfer_s=self._transfers_s.median(),
            nbytes=self._sync_bytes,
        )

    def _now(self) -> float:
        return self._clock() if self._ended_at is None else self._ended_at

    def _wall_s(self) -> float:
        """Return the wall time of all incarnations."""
        return self._before.wall_s + self._now() - self._started_at

    def _rate(self, count: int) -> float | None:
        """Return ``count`` per second in which an incarnation has served weights."""
        serving_s = self._before.serving_s
        if self._state.lifecycle.running_since is not None:
            serving_s += self._now() - self._state.lifecycle.running_since
        return count / serving_s if serving_s > 0 else None


def _last_steps() -> deque[float]:
    return deque(maxlen=WINDOW_STEPS)


def _versions() -> dict[str, str]:
    """Return the installed versions of the libraries that the run uses."""
    found = {"python": platform.python_version()}
    for name in ("offbeat", "ray", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
