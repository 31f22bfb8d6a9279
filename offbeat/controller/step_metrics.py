"""Metrics of one optimizer step: timers, rewards, staleness, lengths.

Pure except for the event loop's clock. Times are in seconds and lengths in tokens. Staleness counts
versions behind the trainer.
"""

import asyncio
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from offbeat.controller.fleet import Fleet
from offbeat.controller.reward_budget import RewardBudget
from offbeat.controller.state import RunState
from offbeat.controller.syncing import SyncReport
from offbeat.messages.groups import OUT_OF_TURNS, Receipt
from offbeat.messages.training import StepResult
from offbeat.telemetry.step_samples import MOST_ROWS, SampleRow, StepSamples, count_in_bins

_ROWS_OF_GROUP: Final = 4  # of a group's samples that trackers show


class StepMetricsBuilder:
    """Collects the figures of a step while it is open. Call ``close`` before ``metrics``.

    Of an aborted attempt, only the times are kept.
    """

    def __init__(self, step: int, now: float) -> None:
        self.step, self.started_at = step, now
        self.timers = defaultdict[str, float](float)
        self.restart(1)

    def restart(self, attempt: int) -> None:
        """Discard the groups of an aborted attempt. The attempt's times still count."""
        self.attempt = attempt
        self.receipts = list[Receipt]()
        self.advantages = list[tuple[float, ...]]()
        self.staleness = Counter[int]()  # samples by versions behind, oldest token
        self.outcome: StepResult | None = None  # once the ledger has it

    @contextmanager
    def measure_time(self, what: str) -> Generator[None, None, None]:
        """Add the duration of the block to a timer, in seconds of the event loop's clock."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            yield
        finally:
            self.timers[what] += clock() - start

    def add(
        self,
        receipts: Sequence[Receipt],
        advantages: Sequence[tuple[float, ...]],
        trainer_version: int,
    ) -> None:
        """Add a chunk that is about to be trained.

        Args:
            receipts: Receipts of its groups.
            advantages: Advantages of each group's samples, in the same order.
            trainer_version: Version that trains the chunk. Staleness is relative to it.
        """
        self.receipts += receipts
        self.advantages += advantages
        oldest = [version for receipt in receipts for version in receipt.oldest_versions]
        self.staleness.update([trainer_version - version for version in oldest])

    def close(
        self,
        result: StepResult,
        state: RunState,
        sync: SyncReport | None,
        releases: Mapping[str, float],
    ) -> None:
        """Add the figures that are known once the step is applied and its weights are requested.

        Args:
            result: Result of the trainer.
            state: State of the run.
            sync: Sync that ended meanwhile, if any.
            releases: Metrics of the releases so far, and of their transfers.
        """
        self.result, self.sync = result, sync
        self._rewards_by_group = [receipt.valid_rewards for receipt in self.receipts]
        self.wall_s = asyncio.get_running_loop().time() - self.started_at
        self.version = state.ledger.trainer_version
        self._fleet = {
            **releases,
            "fleet/serving": state.fleet.serving_count,
            "fleet/restarts": state.fleet.restarts,
            "fleet/retired": len(state.fleet.retired),
            **_summarise_versions(state.fleet),
            **state.cpu.lap(state.fleet.engines.values()),
            "queue/ready_groups": len(state.ledger.ready),
            "queue/in_flight_groups": state.ledger.in_flight,
            "queue/bytes": state.queue.bytes_held,
            "queue/not_spooled": self._not_spooled(state),
            "rollout/retries": sum(state.ledger.totals.retried.values()),
            **RewardBudget(state).metrics(),
            "rollout/worker_losses": state.costs.worker_losses,
            "rollout/workers_lost": len(state.costs.lost_workers),
            "rollout/evicted": state.ledger.totals.evicted,
            "rollout/cancelled": state.ledger.totals.cancelled,
            "rollout/dropped": sum(state.ledger.totals.dropped.values()),
        }

    def _not_spooled(self, state: RunState) -> int:
        """Return the number of groups that would have been lost if the controller had died."""
        wanted = state.config.transfer_queue.spool != "off"
        return sum(receipt.spooled is None for receipt in self.receipts) if wanted else 0

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the valid samples."""
        return [reward for rewards in self._rewards_by_group for reward in rewards]

    def compute_mean(self, what: Literal["generate_s", "reward_s"]) -> float:
        """Return the mean time that a group spent in the engine, or in environment and reward."""
        in_engine = what == "generate_s"
        return statistics.fmean([r.generate_s if in_engine else r.reward_s for r in self.receipts])

    @property
    def has_signal(self) -> bool:
        """Return whether the rewards within any group differ."""
        return any(min(each) < max(each) for each in self._rewards_by_group)

    @property
    def train_s(self) -> float:
        """Return the duration of the step without its sync and without waiting for groups."""
        return self.wall_s - self.timers["wait_groups"] - self.timers["sync"]

    def metrics(self) -> dict[str, float]:
        """Return every figure of this step, under the names of the metric table."""
        rewards = self.rewards
        generated = [n for receipt in self.receipts for n in receipt.generated_tokens]
        truncated = sum(receipt.truncated_samples for receipt in self.receipts)
        out_of_turns = sum(r.finish_reasons.count(OUT_OF_TURNS) for r in self.receipts)
        flat = sum(min(each) == max(each) for each in self._rewards_by_group)
        samples, tokens = len(rewards), sum(receipt.tokens for receipt in self.receipts)
        return {
            **self.result.metrics,
            **self.result.speed,
            "train/reward": statistics.fmean(rewards),
            "train/reward_std": _deviation(rewards),
            "train/zero_variance_groups": flat / len(self.receipts),
            "train/loss": self.result.loss,
            "train/grad_norm": self.result.grad_norm,
            "train/learning_rate": self.result.learning_rate,
            "train/tokens": self.result.tokens,
            "train/sequences": self.result.sequences,
            "train/chunks": self.result.chunks,
            "off_policy/staleness_mean": sum(s * n for s, n in self.staleness.items()) / samples,
            "off_policy/staleness_max": max(self.staleness),
            "rollout/response_tokens_mean": statistics.fmean(generated),
            "rollout/truncated_fraction": truncated / samples,
            "rollout/out_of_turns_fraction": out_of_turns / samples,
            "rollout/textless_fraction": sum(r.textless_tokens for r in self.receipts)
            / max(1, sum(sum(r.valid_tokens) for r in self.receipts)),
            **self._per_sample(),
            **self._rewards_by_name(),
            **self._by_environment(),
            "rollout/generate_s_mean": self.compute_mean("generate_s"),
            "rollout/reward_s_mean": self.compute_mean("reward_s"),
            "time/step_s": self.wall_s,
            "time/train_s": self.train_s,
            **{f"time/{name}_s": value for name, value in self.timers.items()},
            **self._sync_metrics(),
            **self._fleet,
            "throughput/samples_per_s": samples / self.wall_s if self.wall_s else 0.0,
            "throughput/tokens_per_s": tokens / self.wall_s if self.wall_s else 0.0,
        }

    def samples(self) -> StepSamples:
        """Return the step's valid samples as histograms and some rows."""
        generated = [n for receipt in self.receipts for n in receipt.generated_tokens]
        return StepSamples(
            rewards=count_in_bins(self.rewards),
            response_tokens=count_in_bins(generated),
            rows=tuple(itertools.islice(self._sample_rows(), MOST_ROWS)),
        )

    def _sample_rows(self) -> Iterator[SampleRow]:
        """Yield the first valid samples of each group."""
        for receipt, advantages in zip(self.receipts, self.advantages, strict=True):
            samples = zip(receipt.valid, receipt.rewards, advantages, strict=True)
            of_group = (
                SampleRow(receipt.prompt_index, receipt.attempt, sample, reward, advantage)
                for sample, (valid, reward, advantage) in enumerate(samples)
                if valid
            )
            yield from itertools.islice(of_group, _ROWS_OF_GROUP)

    def _per_sample(self) -> dict[str, float]:
        """Return figures per sample, masked samples included.

        They cover failed samples, branches of agents' samples, and samples with a refused request.
        """
        receipts = self.receipts
        samples = sum(receipt.samples for receipt in receipts)
        branches = sum(sum(r.branches) if r.branches else r.samples for r in receipts)
        return {
            "rollout/masked_fraction": sum(r.masked_samples for r in receipts) / samples,
            "rollout/retried_fraction": sum(r.retried_samples for r in receipts) / samples,
            "rollout/late_fraction": sum(r.late_samples for r in receipts) / samples,
            "rollout/branches_mean": branches / samples,
            "rollout/branched_fraction": sum(r.branched_samples for r in receipts) / samples,
            "rollout/refused_fraction": sum(r.refused_samples for r in receipts) / samples,
        }

    def _rewards_by_name(self) -> dict[str, float]:
        """Return the mean of each named reward, over the valid samples that it applies to."""
        values, skipped = defaultdict[str, list[float]](list), defaultdict[str, float](float)
        samples = sum(map(len, self._rewards_by_group))
        for receipt in self.receipts:
            for name, by_sample in receipt.rewards_by_name:
                valid = receipt.of_valid(by_sample)
                applied = [value for value in valid if value is not None]
                values[f"rewards/{name}"] += applied
                if len(applied) < len(valid):
                    skipped[f"rewards_skipped/{name}"] += (len(valid) - len(applied)) / samples
        return {name: statistics.fmean(found) for name, found in values.items() if found} | skipped

    def rewards_by_environment(self) -> dict[str, list[float]]:
        """Return the rewards of the valid samples by environment, if there are several."""
        rewards = defaultdict[str, list[float]](list)
        for receipt in self.receipts:
            if receipt.environment:
                rewards[receipt.environment] += receipt.valid_rewards
        return rewards

    def _by_environment(self) -> dict[str, float]:
        """Return reward, share of groups and response length per environment, if several exist."""
        figures = dict[str, float]()
        for name, rewards in self.rewards_by_environment().items():
            own = [receipt for receipt in self.receipts if receipt.environment == name]
            tokens = [count for receipt in own for count in receipt.of_valid(receipt.valid_tokens)]
            figures |= {
                f"environment/{name}/reward": statistics.fmean(rewards),
                f"environment/{name}/share": len(own) / len(self.receipts),
                f"environment/{name}/response_tokens_mean": statistics.fmean(tokens),
            }
        return figures

    def _sync_metrics(self) -> dict[str, float]:
        """Return the figures of the sync that ended during the step, or nothing without one."""
        if self.sync is None:
            return {}
        return {
            "sync/pause_s": self.sync.pause_s,
            "sync/transfer_s": self.sync.transfer_s,
            "sync/bytes": self.sync.nbytes,
        }


def _summarise_versions(fleet: Fleet) -> dict[str, float]:
    """Return the metrics of served versions, or nothing if no engine serves."""
    versions = [engine.version for engine in fleet.serving]
    if not versions:
        return {}
    return {"fleet/oldest_version": min(versions), "fleet/newest_version": max(versions)}


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of ``values`` as a population.

    ``statistics.pstdev`` computes in rationals and is a hundred times slower.
    """
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
