"""The one place that declares a metric: name, unit, reduction over the step, meaning, what to do.

``docs/metrics.md`` is generated from it: ``python -m offbeat.telemetry.metrics_doc``.
"""

from typing import Final

from offbeat.algorithms.staleness_buckets import LABELS, PERCENTILES, metric_name

_Row = tuple[str, str, str, str, str]

# fmt: off
# A table is read as a table: a row is three lines.
_TRAIN: Final[tuple[_Row, ...]] = (
    ("train/reward", "reward", "mean",
     "Reward of the samples trained in the step.",
     "Learning, as long as samples read well; a sudden jump with shorter answers is a hole in the reward."),
    ("train/reward_std", "reward", "mean",
     "Standard deviation of the rewards in the step, over all samples.",
     "More signal to learn from. Near 0: the task is solved or hopeless; change its difficulty."),
    ("train/loss", "1", "mean",
     "The whole loss, KL penalty included, divided by the step's valid tokens or sequences.",
     "Says little in policy gradients; look at train/reward and off_policy/logprob_gap_mean."),
    ("train/policy_loss", "1", "mean",
     "The loss without its KL penalty.",
     "As train/loss."),
    ("train/grad_norm", "1", "last",
     "L2 norm of the whole gradient before clipping.",
     "A spike: outliers in rewards or lengths. A steady climb: lower the learning rate."),
    ("train/learning_rate", "1", "last",
     "Learning rate of the step.",
     "As the schedule says."),
    ("train/tokens", "tokens", "sum",
     "Tokens with loss in the step, over all ranks.",
     "Longer answers: steps take longer and need more memory."),
    ("train/sequences", "sequences", "sum",
     "Sequences with at least one token with loss.",
     "Fewer than groups_per_step * samples_per_group: groups were dropped from the step."),
    ("train/chunks", "chunks", "sum",
     "Calls of train_microbatch that made up the step.",
     "Groups trickle in and are trained in small pieces; raise min_tokens_per_chunk if the trainer is busy."),
    ("train/ratio_mean", "1", "mean",
     "Importance ratio of trained to old policy, over tokens.",
     "Far from 1: the data is off policy; lower sampler.max_staleness."),
    ("train/ratio_min", "1", "min",
     "Smallest importance ratio of a token.",
     "Good: it was below 1."),
    ("train/ratio_max", "1", "max",
     "Largest importance ratio of a token.",
     "Some tokens are far off policy; lower sampler.max_staleness or cap the weights (tis_cap)."),
    ("train/clip_fraction_low", "fraction", "mean",
     "Tokens that the lower clip bound holds: they lost their gradient (cispo: their weight is the bound).",
     "Data is too old or the learning rate too high."),
    ("train/clip_fraction_high", "fraction", "mean",
     "Tokens that the upper clip bound holds: they lost their gradient (cispo: their weight is the bound).",
     "Data is too old or the learning rate too high."),
    ("train/kl_reference", "nats/token", "mean",
     "KL divergence from the reference policy.",
     "The policy leaves its start. Without more reward: raise algorithm.kl_coef."),
    ("train/tis_weight_mean", "1", "mean",
     "Truncated importance weight between recomputed and generation logprobs.",
     "Far from 1: engine and trainer compute different policies; see off_policy/logprob_gap_mean."),
    ("train/clip_fraction_dual", "fraction", "mean",
     "Tokens of negative advantage whose ratio rose over dual_clip and lost their gradient.",
     "Some tokens are far off policy; lower sampler.max_staleness."),
    ("train/icepop_masked_fraction", "fraction", "mean",
     "Tokens whose weight left icepop_band, so that they trained nothing.",
     "Engine and trainer compute different policies, or the data is old; see staleness/."),
    ("train/sequence_masked_fraction", "fraction", "mean",
     "Sequences that left sequence_band, so that they trained nothing.",
     "As train/icepop_masked_fraction; near 1 the band is too narrow for this model and staleness."),
    ("train/zero_variance_groups", "fraction", "mean",
     "Groups whose samples all got the same reward: they carry no signal.",
     "Prompts are too easy or too hard; change the data, or draw more samples per group."),
)

_OFF_POLICY: Final[tuple[_Row, ...]] = (
    ("off_policy/staleness_mean", "versions", "mean",
     "Weight versions between the oldest token of a sample and its training.",
     "Generators run far ahead; fine up to the bound if the reward holds."),
    ("off_policy/staleness_max", "versions", "max",
     "Staleness of the oldest sample trained in the step.",
     "Cannot pass sampler.max_staleness. Always at it: long rollouts decide; see rollout/generate_s_mean."),
    ("off_policy/logprob_gap_mean", "nats", "mean",
     "Distance between the trainer's logprob of a token and the engine's.",
     "At staleness 0 it should be near 0: otherwise engine and trainer differ in dtype or kernels."),
    ("off_policy/logprob_gap_max", "nats", "max",
     "The largest such distance.",
     "One broken token: compare the engine's sampling settings with the trainer's temperature."),
    ("off_policy/logprob_gap_on_policy", "nats", "pooled",
     "As logprob_gap_mean, over samples drawn wholly under the weights being trained; absent below 32 tokens.",
     "Engine and trainer compute different policies from the same weights; see sync.max_logprob_gap."),
    ("off_policy/behaviour_kl", "nats/token", "mean",
     "KL divergence between the policy that sampled and the one being trained.",
     "Lower sampler.max_staleness, sync more often, or lower the learning rate."),
)

_BY_STALENESS: Final[tuple[_Row, ...]] = (
    *((f"ratio_p{q:02d}", "1", "pooled",
       f"Percentile {q} of the behaviour ratio exp(trained - generation logprob), of tokens",
       "Far from 1: data of this age is off policy. At staleness 0: engine and trainer differ.")
      for q in PERCENTILES),
    ("clip_fraction", "fraction", "pooled",
     "Share that a bound of the loss holds, of tokens",
     "Data of this age teaches little; lower sampler.max_staleness."),
    ("behaviour_kl", "nats/token", "pooled",
     "KL divergence between the policy that sampled and the one being trained, of tokens",
     "Grows with age: lower sampler.max_staleness, or the learning rate."),
    ("ess", "fraction", "pooled",
     "Effective sample size, the behaviour ratio as weight, as a share of the number of tokens",
     "Good: 1 is on policy. Far below: a few tokens would carry all the weight."),
    ("token_fraction", "fraction", "pooled",
     "Share in the step of tokens",
     "The step is made of data of this age."),
)
_STALENESS: Final[tuple[_Row, ...]] = tuple(
    (
        metric_name(name, label),
        unit,
        how,
        f"{meaning} {label.replace('_up', ' or more').replace('_', ' to ')} versions old; absent without any.",
        rises,
    )
    for name, unit, how, meaning, rises in _BY_STALENESS
    for label in LABELS
)

_ROLLOUT: Final[tuple[_Row, ...]] = (
    ("rollout/response_tokens_mean", "tokens", "mean",
     "Generated tokens of a sample.",
     "Answers grow; without more reward, look for repetition in the samples."),
    ("rollout/truncated_fraction", "fraction", "mean",
     "Samples cut at max_new_tokens.",
     "Raise max_new_tokens, or penalise length."),
    ("rollout/generate_s_mean", "s", "mean",
     "Time of a group in the engine, first to last turn.",
     "Longer answers or a fuller engine; add engines if the trainer waits."),
    ("rollout/reward_s_mean", "s", "mean",
     "Time of a group in environment and reward.",
     "The reward is slow; make it cheaper or add environment workers."),
    ("rollout/retries", "groups", "last",
     "Rollouts tried again since the run began.",
     "Engines or the environment fail; the log says which reason."),
    ("rollout/dropped", "groups", "last",
     "Prompt groups given up since the run began.",
     "Data is being lost: summary.json and the log count it by reason."),
)

_EVAL: Final[tuple[_Row, ...]] = (
    ("eval/reward", "reward", "mean",
     "Reward of the held-out prompts, all sampled from one weight version.",
     "Better on prompts that are not trained on. Apart from train/reward: over-fitting, or other prompts."),
    ("eval/samples", "samples", "sum",
     "Samples scored in the evaluation.",
     "As eval.prompts and eval.samples say."),
    ("eval/response_tokens_mean", "tokens", "mean",
     "Length of the scored responses.",
     "As rollout/response_tokens_mean."),
    ("eval/version", "version", "last",
     "The weight version that was scored; the record stands at the trainer's version of then.",
     "Follows the trainer version."),
)
_TIME: Final[tuple[_Row, ...]] = (
    ("time/step_s", "s", "sum",
     "Wall time of the step, weight sync included.",
     "Its parts below say which."),
    ("time/wait_groups_s", "s", "sum",
     "The trainer waited for groups to be ready.",
     "Generators are the bottleneck: more engines, shorter answers, or more staleness."),
    ("time/train_s", "s", "sum",
     "The step without waiting for groups and without weight sync.",
     "More tokens per step (train/tokens), or a busy machine."),
    ("time/sync_s", "s", "sum",
     "The trainer stood still for weight sync.",
     "Sync less often (sync.interval), or use a faster transport."),
    ("time/prepare_logprobs_s", "s", "sum",
     "Recomputing policy or reference logprobs.",
     "More tokens; drop kl_coef or use generation logprobs if they need not be recomputed."),
    ("time/checkpoint_s", "s", "sum",
     "The trainer wrote its whole state to disk.",
     "Write less often (checkpoint.interval), or to a faster disk."),
    ("time/advantage_s", "s", "sum",
     "Computing advantages in the controller.",
     "Should be a few milliseconds: otherwise the estimator is slow."),
)

_MEMORY: Final[tuple[_Row, ...]] = (
    ("memory/peak_logprobs_bytes", "bytes", "max",
     "Most memory of a trainer rank while logprobs were prepared: on CUDA of tensors, on the CPU of the process.",
     "As memory/peak_train_bytes; without a backward pass it should be lower."),
    ("memory/peak_train_bytes", "bytes", "max",
     "The same, while forward and backward passes ran.",
     "Near the device's memory: lower trainer.max_tokens_per_microbatch, or set activation_checkpointing."),
    ("memory/peak_finish_bytes", "bytes", "max",
     "The same, while the optimizer stepped.",
     "Weights, gradients and moments: more data_parallel ranks hold less each."),
    ("memory/peak_publish_bytes", "bytes", "max",
     "The same, in the weight sync before the step.",
     "The highest of all: lower sync.chunk_mb."),
    ("memory/peak_checkpoint_bytes", "bytes", "max",
     "The same, in the checkpoint before the step, if there was one.",
     "It should be near memory/peak_finish_bytes: a rank writes what it holds."),
)

_SYNC: Final[tuple[_Row, ...]] = (
    ("sync/pause_s", "s", "max",
     "Longest time an engine's decoding stood still for new weights.",
     "Engines finish long samples first (drain); try another sync.mode."),
    ("sync/transfer_s", "s", "max",
     "Longest time an engine took to receive and verify the weights.",
     "A slow transport, or too many engines for one source."),
    ("sync/bytes", "bytes", "sum",
     "Bytes of one copy of the weights.",
     "Constant within a run."),
    ("sync/unchanged_releases", "releases", "last",
     "Releases with the content of the release before, although a step was applied.",
     "The learning rate is lost in 16 bits; raise it, or serve float32 weights."),
)

_FLEET: Final[tuple[_Row, ...]] = (
    ("fleet/serving", "engines", "last",
     "Engines that hold acknowledged weights and take work.",
     "Engines came back."),
    ("fleet/restarts", "restarts", "last",
     "Engine restarts since this controller began.",
     "Engines die: see their logs under logs/ for memory and CUDA errors."),
    ("queue/ready_groups", "groups", "last",
     "Finished groups that wait for the trainer.",
     "The trainer is the bottleneck."),
    ("queue/in_flight_groups", "groups", "last",
     "Groups being rolled out.",
     "More work is outstanding; bounded by the sampler and the buffer."),
    ("queue/bytes", "bytes", "last",
     "Payload held for groups that are ready or being trained.",
     "Near buffer's bound, admission stops; longer answers take more."),
    ("queue/not_spooled", "groups", "sum",
     "Groups trained in the step that had no copy in RUN/spool, with transfer_queue.spool=ready.",
     "The disk of the run directory refuses (spool.refused in a worker's log): free it."),
)

_SPEED: Final[tuple[_Row, ...]] = (
    ("throughput/samples_per_s", "samples/s", "mean",
     "Samples trained per second of the step.",
     "Good."),
    ("throughput/tokens_per_s", "tokens/s", "mean",
     "Prompt and response tokens trained per second of the step.",
     "Good."),
    ("busy/trainer_fraction", "fraction", "mean",
     "Share of the step in which the trainer computed.",
     "At 1 the trainer is the bottleneck."),
    ("busy/generator_fraction", "fraction", "mean",
     "Share of the step in which an engine computed, mean over engines.",
     "At 1 generators are the bottleneck."),
    ("busy/trainer_unattributed_fraction", "fraction", "mean",
     "Share of the step in which nobody can say what the trainer did or waited for.",
     "Above 0.01 the time accounting misses a wait: report it, with the trace.json of the run."),
    ("busy/generator_unattributed_fraction", "fraction", "mean",
     "Share of the step in which nobody can say what an engine did or waited for, mean over engines.",
     "Above 0.01 the time accounting misses a wait: report it, with the trace.json of the run."),
)

ROWS: Final[tuple[_Row, ...]] = (
    *_TRAIN, *_OFF_POLICY, *_STALENESS, *_ROLLOUT, *_EVAL, *_TIME, *_MEMORY, *_SYNC, *_FLEET,
    *_SPEED,
)
# fmt: on
"""(name, unit, reduction, meaning, what to do when it rises)."""
