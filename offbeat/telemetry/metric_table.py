"""Declares all metrics: name, unit, reduction over the step, meaning, what to do.

``docs/metrics.md`` is generated from this table: ``python -m offbeat.telemetry.metrics_doc``.

Also defines the records and errors of the table.
"""

import difflib
import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from offbeat.messages.failures import OffbeatError
from offbeat.telemetry.training_metrics import TRAINING, Row

# fmt: off
# A table is read as a table: a row is three lines.
_ROLLOUT: Final[tuple[Row, ...]] = (
    ("rollout/response_tokens_mean", "tokens", "mean",
     "Generated tokens of a sample over all turns, without observations.",
     "Answers grow. If the reward does not, look for repetition in samples."),
    ("rollout/truncated_fraction", "fraction", "mean",
     "Samples with a turn that ran out of tokens.",
     "Raise max_new_tokens, or penalise length."),
    ("rollout/out_of_turns_fraction", "fraction", "mean",
     "Episodes that environment.max_turns cut off.",
     "Raise environment.max_turns (default 1)."),
    ("rollout/masked_fraction", "fraction", "mean",
     "Failed samples that are masked: they have no gradient and count in no other metric.",
     "Environment or reward fails on the model's output: see `offbeat why`."),
    ("rollout/retried_fraction", "fraction", "mean",
     "Samples drawn again after a failure. Retries favour short samples, which fail less often.",
     "As rollout/masked_fraction. Above a few percent: try rollout.on_failed_sample=mask."),
    ("rollout/late_fraction", "fraction", "mean",
     "Samples, mostly long, that were masked because the environment was late.",
     "Raise rollout.deadline_s, or make the environment faster."),
    ("rollout/branches_mean", "branches", "mean",
     "Branches per sample, masked ones included; 1 unless history is rewritten.",
     "Tokens that branches share are computed once per branch: avoid rewriting history."),
    ("rollout/branched_fraction", "fraction", "mean",
     "Samples with more than one branch; rollout.branches decides whether they are trained.",
     "Expected if agents summarize. Otherwise find the code that edits history."),
    ("rollout/refused_fraction", "fraction", "mean",
     "Agent samples for which the endpoint refused a request.",
     "Agents continue without the answer. See agent.request_refused in the worker's log."),
    ("rollout/textless_fraction", "fraction", "mean",
     "Trained tokens whose ids the tokenizer lacks. They have no text, so no reward sees them.",
     "Should be 0. Cut the embeddings to the tokenizer's size."),
    ("rollout/generate_s_mean", "s", "mean",
     "Time that a group spends in the engine, from its first to its last turn.",
     "Answers are longer or engines fuller. If the trainer waits, add engines."),
    ("rollout/reward_s_mean", "s", "mean",
     "Time that a group spends in environment and reward.",
     "The reward is slow; make it cheaper or add environment workers."),
    ("rollout/retries", "groups", "last",
     "Rollouts tried again since the run began.",
     "Engines or the environment fail; the log has the reason."),
    ("rollout/reward_calls", "calls", "last",
     "Reward function calls since the run began, including retries, evaluations and resumes.",
     "A paid judge costs more; rollout.reward_call_budget bounds the calls."),
    ("rollout/reward_calls_left", "calls", "last",
     "Calls left in rollout.reward_call_budget, minus the reserve for evaluation and open groups.",
     "If one step needs about this many, the run ends soon: raise the budget and resume."),
    ("rollout/worker_losses", "losses", "last",
     "Environment workers that died, hung or were replaced since the run began.",
     "See offbeat report, logs/environment-*.log, and the memory of rewards."),
    ("rollout/workers_lost", "workers", "last",
     "Environment workers that were lost and have not answered since.",
     "A worker stays away: see logs/environment-*.log, and check its machine."),
    ("rollout/evicted", "groups", "last",
     "Ready groups rolled out again since the run began, because they exceeded sampler.max_staleness.",
     "Generation is ahead: lower sampler.over_sampling_ratio or raise sampler.max_staleness."),
    ("rollout/cancelled", "groups", "last",
     "Rollouts stopped in flight since the run began, because they were too old or rewound.",
     "Rollouts outlast the window: raise sampler.max_staleness, or shorten rollouts."),
    ("rollout/dropped", "groups", "last",
     "Prompt groups given up since the run began.",
     "Data is lost. summary.json and the log count it by reason."),
)

_REWARDS: Final[tuple[Row, ...]] = (
    ("rewards/NAME", "1", "mean",
     "Unweighted value of function NAME in `environment.rewards`, or of NAME from an agent or environment.",
     "Depends on the function. If one rises while another falls, change their weights."),
    ("rewards_skipped/NAME", "fraction", "mean",
     "Samples whose function NAME returned None; not counted in rewards/NAME. Absent at 0.",
     "Expected if a reward applies only to some rows. At 1, its condition is wrong."),
)

_ENVIRONMENTS: Final[tuple[Row, ...]] = (
    ("environment/reward", "reward", "mean",
     "With `environments`: reward of one environment, named environment/NAME/reward.",
     "If one is flat while others rise, raise its weight or train it separately."),
    ("environment/share", "fraction", "mean",
     "With `environments`: share of the step's groups from this environment.",
     "Far from its weight: the others' groups are filtered, dropped, or slower."),
    ("environment/response_tokens_mean", "tokens", "mean",
     "With `environments`: generated tokens per sample of this environment, without observations.",
     "If only this one grows, this environment determines how long rollouts take."),
)

_EVAL: Final[tuple[Row, ...]] = (
    ("eval/reward", "reward", "mean",
     "Mean reward of each prompt (mean@k), averaged over prompts, at one version. Sets: eval/NAME/reward.",
     "Better on held-out prompts (eval.path). Far below train/reward: overfitting, or other prompts."),
    ("eval/reward_se", "reward", "mean",
     "Standard error of eval/reward, over prompts.",
     "Differences below twice this mean nothing. Raise eval.prompts."),
    ("eval/pass@K", "fraction", "mean",
     "Unbiased probability that one of K samples is correct; K = 1, 2, ... eval.samples.",
     "Above eval/reward: the model can solve the task, but not reliably."),
    ("eval/maj@K", "fraction", "mean",
     "Prompts whose majority answer of K = eval.samples is correct; needs extracted answers.",
     "Above eval/pass@1: voting helps."),
    ("eval/samples", "samples", "sum",
     "Samples scored in the evaluation.",
     "At most eval.prompts times eval.samples."),
    ("eval/masked_samples", "samples", "sum",
     "Failed samples of the evaluation that are masked; not in eval/samples.",
     "As rollout/masked_fraction."),
    ("eval/response_tokens_mean", "tokens", "mean",
     "Generated tokens of a scored sample.",
     "As rollout/response_tokens_mean."),
    ("eval/version", "version", "last",
     "Weight version that was scored. The record has the same version.",
     "Follows the trainer version."),
)
_TIME: Final[tuple[Row, ...]] = (
    ("time/step_s", "s", "sum",
     "Wall time of the step, weight sync included.",
     "See its parts below."),
    ("time/wait_groups_s", "s", "sum",
     "The trainer waited for groups to be ready.",
     "Generators are the bottleneck: more engines, shorter answers, or more staleness."),
    ("time/train_s", "s", "sum",
     "The step, minus its waits for groups and for weight sync.",
     "More tokens per step (train/tokens), or a busy machine."),
    ("time/sync_s", "s", "sum",
     "The trainer waited for weight sync.",
     "Sync less often (sync.interval), or use a faster transport."),
    ("time/prepare_logprobs_s", "s", "sum",
     "Recomputing policy or reference logprobs.",
     "More tokens. Recompute less: drop kl_coef, or use generation logprobs."),
    ("time/checkpoint_s", "s", "sum",
     "The trainer wrote its whole state to disk.",
     "Write less often (checkpoint.interval), or to a faster disk."),
    ("time/advantage_s", "s", "sum",
     "Computing advantages in the controller.",
     "Should be a few milliseconds. Else the estimator is slow."),
)

_CPU: Final[tuple[Row, ...]] = (
    ("cpu/trainer_s", "s", "sum",
     "CPU seconds of the trainer ranks since the last step, over all threads.",
     "If it is far below time/train_s on a CPU, other processes use the trainer's cores."),
    ("cpu/engines_s", "s", "sum",
     "CPU seconds of engines since the last step, without children such as vLLM's core.",
     "If this plus cpu/trainer_s is near cores times time/step_s, overlap gains little."),
    ("cpu/workers_s", "s", "sum",
     "CPU seconds of environment workers since the last step, without reward and agent processes.",
     "Near time/step_s per worker: raise environment.workers."),
    ("cpu/controller_s", "s", "sum",
     "CPU seconds of the controller since the last step.",
     "Near time/step_s: the controller is the limit; make groups larger."),
)

_MEMORY: Final[tuple[Row, ...]] = (
    ("memory/peak_logprobs_bytes", "bytes", "max",
     "Peak of a trainer rank while preparing logprobs: tensors (CUDA) or process (CPU).",
     "As memory/peak_train_bytes."),
    ("memory/peak_train_bytes", "bytes", "max",
     "The same, during forward and backward passes.",
     "Near the device's memory: lower trainer.max_tokens_per_microbatch, or set activation_checkpointing."),
    ("memory/peak_finish_bytes", "bytes", "max",
     "The same, during the optimizer step.",
     "Weights, gradients and moments. With more data_parallel ranks, each holds less."),
    ("memory/peak_reserved_bytes", "bytes", "max",
     "Most memory that torch's allocator held in any phase; only on CUDA.",
     "Far above the other peaks: fragmentation."),
    ("memory/peak_publish_bytes", "bytes", "max",
     "The peak in the weight sync before the step.",
     "If this is the highest peak, lower sync.chunk_mib."),
    ("memory/peak_checkpoint_bytes", "bytes", "max",
     "The peak in the checkpoint before the step, if any.",
     "Normal: near memory/peak_finish_bytes."),
)

_SYNC: Final[tuple[Row, ...]] = (
    ("sync/pause_s", "s", "max",
     "Longest time that an engine's decoding was paused for new weights.",
     "With sync.mode=drain, engines first finish long samples: try another mode."),
    ("sync/transfer_s", "s", "max",
     "Longest time that an engine needed to receive and verify the weights.",
     "A slow transport, or too many engines for one source."),
    ("sync/bytes", "bytes", "sum",
     "Bytes of one copy of the weights.",
     "Constant within a run."),
    ("sync/sent_bytes", "bytes", "sum",
     "Bytes of releases and deltas that engines were asked to load, over all engines.",
     "Should fall with sync.delta. Many full releases: see sync/full_releases."),
    ("sync/changed_fraction", "fraction", "mean",
     "Share of values that differ from the last release, with sync.delta.",
     "Above 0.4, releases are sent whole: the learning rate is large, or weights have 32 bits."),
    ("sync/full_releases", "releases", "sum",
     "Full loads although sync.delta is set: the sum of the four counts below.",
     "See which count below is high. A trainer's first release is always full."),
    ("sync/full_no_base", "releases", "sum",
     "Full loads of the first release after the trainer started or was restored.",
     "The trainer restarts or rewinds often."),
    ("sync/full_too_large", "releases", "sum",
     "Full loads because the changes exceeded half of the full release.",
     "Disable sync.delta, or serve 16-bit weights (model.dtype, sync.wire_dtype)."),
    ("sync/full_unknown_base", "releases", "sum",
     "Full loads because the engine was not known to serve the last release.",
     "Engines restart, fail syncs, or skip releases."),
    ("sync/full_refused", "releases", "sum",
     "Full loads because the engine refused the delta: it served a different release.",
     "An engine restarted unnoticed between two releases."),
    ("sync/unchanged_releases", "releases", "last",
     "Releases equal to the previous release, although a step was applied.",
     "Updates are lost in 16 bits. Raise the learning rate or serve float32."),
)

_FLEET: Final[tuple[Row, ...]] = (
    ("fleet/serving", "engines", "last",
     "Engines that hold acknowledged weights and take work.",
     "Engines came back."),
    ("fleet/restarts", "restarts", "last",
     "Engine restarts since this controller began.",
     "Engines die: see their logs under logs/ for memory and CUDA errors."),
    ("fleet/retired", "engines", "last",
     "Engines that this controller retired. The run continues without them.",
     "An engine failed repeatedly: see engine.retired in logs/controller.log."),
    ("fleet/oldest_version", "version", "last",
     "Oldest weight version of an engine that takes work.",
     "Normal: follows the trainer's version. Flat: engines load no new weights."),
    ("fleet/newest_version", "version", "last",
     "Newest weight version of an engine that takes work.",
     "Normal. Far above fleet/oldest_version: an engine is behind or pinned."),
    ("queue/ready_groups", "groups", "last",
     "Finished groups that wait for the trainer.",
     "The trainer is the bottleneck."),
    ("queue/in_flight_groups", "groups", "last",
     "Groups being rolled out.",
     "More work is outstanding; bounded by the sampler and the buffer."),
    ("queue/bytes", "bytes", "last",
     "Payload held for groups that are ready or being trained.",
     "Admission stops near the buffer's bound. Longer answers need more."),
    ("queue/not_spooled", "groups", "sum",
     "Groups trained in the step that had no copy in RUN/spool. 0 with transfer_queue.spool=off.",
     "The disk refuses writes (spool.refused in a worker's log). Free space."),
)

_SPEED: Final[tuple[Row, ...]] = (
    ("throughput/samples_per_s", "samples/s", "mean",
     "Samples trained per second of the step.",
     "Good."),
    ("throughput/tokens_per_s", "tokens/s", "mean",
     "Prompt and response tokens trained per second of the step.",
     "Good."),
    ("throughput/device_tokens_per_s", "tokens/s", "mean",
     "Tokens per second and device in training passes. Padding does not count, shared prompts count once.",
     "Good. If low: attention with long rows, or overhead of many short chunks."),
    ("throughput/device_flop_per_s", "FLOP/s", "mean",
     "Model FLOPs per second in training passes (arXiv:2204.02311, app. B); absent if a part is unknown.",
     "Good. Recomputed layers do not count. Low in a pipeline: stages wait."),
    ("throughput/mfu", "fraction", "mean",
     "The same, as a share of the GPU's peak; absent if the peak is unknown, as on CPUs.",
     "Good: 0.3 to 0.5 is usual for large models."),
    ("busy/trainer_fraction", "fraction", "mean",
     "Share of the step in which the trainer computed.",
     "At 1 the trainer is the bottleneck."),
    ("busy/generator_fraction", "fraction", "mean",
     "Share of the step in which an engine computed, mean over engines.",
     "At 1 generators are the bottleneck."),
    ("busy/trainer_unattributed_fraction", "fraction", "mean",
     "Share of the step with unknown trainer activity.",
     "Above 0.01 report it with the run's trace.json."),
    ("busy/generator_unattributed_fraction", "fraction", "mean",
     "Share of the step with unknown engine activity, mean over engines.",
     "Above 0.01 report it with the run's trace.json."),
)

ROWS: Final[tuple[Row, ...]] = (
    *TRAINING, *_ROLLOUT, *_REWARDS, *_ENVIRONMENTS, *_EVAL, *_TIME, *_CPU, *_MEMORY,
    *_SYNC, *_FLEET, *_SPEED,
)
# fmt: on


class MetricReduction(enum.StrEnum):
    """Reduction of the values within one step to one number."""

    LAST = "last"  # the value at the end of the step
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    POOLED = "pooled"  # computed once, from sums or counts over the whole step


class MetricSpec(msgspec.Struct, frozen=True):
    """One row of the metric table."""

    name: str
    unit: str
    reduction: MetricReduction  # over the values of a step
    meaning: str
    when_it_rises: str


class UndeclaredMetric(OffbeatError):
    """A metric name that is not in the table.

    Fix: report it.
    """

    name: str
    nearest: str

    def __str__(self) -> str:
        return (
            f"metric {self.name!r} is not declared; the nearest is {self.nearest!r}. "
            "Use that, or add a row to offbeat/telemetry/metric_table.py"
        )


def _table() -> Mapping[str, MetricSpec]:
    metrics = [
        MetricSpec(name, unit, MetricReduction(how), *texts) for name, unit, how, *texts in ROWS
    ]
    return MappingProxyType({metric.name: metric for metric in metrics})


METRICS: Final[Mapping[str, MetricSpec]] = _table()
"""Metrics by name, in the order of the table."""


_OF_SET: Final = re.compile(r"eval/(?:[A-Za-z0-9][A-Za-z0-9_-]*/)?([a-z_]+)(?:@\d+)?")


_NAMED_BY_USER: Final = ("rewards/", "loss/")
_OF_ENVIRONMENT: Final = re.compile(r"environment/[^/]+/([a-z_]+)")


def declared_name(name: str) -> str:
    """Return a metric's name in the table, such as ``eval/pass@K`` for the pass@4 of a set."""
    for prefix in _NAMED_BY_USER:
        if name.startswith(prefix):
            return f"{prefix}NAME"
    if own := _OF_ENVIRONMENT.fullmatch(name):
        return f"environment/{own[1]}"
    found = _OF_SET.fullmatch(name)
    if found is None:
        return name
    return f"eval/{found[1]}@K" if "@" in name else f"eval/{found[1]}"


def undeclared(name: str) -> UndeclaredMetric:
    """Return the error for a name that is not in the table."""
    (nearest,) = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
    return UndeclaredMetric(name, nearest)
