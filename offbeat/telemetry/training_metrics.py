"""Declares the metrics of training: the step, experts, and how far off policy it was.

Part of ``metric_table``.
"""

from typing import Final

from offbeat.algorithms.staleness_buckets import LABELS, PERCENTILES, metric_name

Row = tuple[str, str, str, str, str]
"""Name, unit, reduction, meaning, what to do when it rises."""

# fmt: off
# A table is read as a table: a row is three lines.
_TRAIN: Final[tuple[Row, ...]] = (
    ("train/reward", "reward", "mean",
     "Reward of the samples trained in the step.",
     "Learning, if samples read well. A jump with shorter answers: a loophole in the reward."),
    ("train/reward_std", "reward", "mean",
     "Standard deviation of all rewards in the step.",
     "More signal. Near 0: the task is solved or hopeless; change its difficulty."),
    ("train/loss", "1", "mean",
     "Loss per valid token or sequence, including KL penalty and entropy bonus.",
     "Says little in policy gradients; see train/reward and off_policy/logprob_gap_mean."),
    ("train/policy_loss", "1", "mean",
     "Loss without KL penalty and entropy bonus.",
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
     "Groups arrive slowly and train in small chunks. If the trainer is busy: raise min_tokens_per_chunk."),
    ("train/optimizer_steps", "steps", "sum",
     "Optimizer steps of the step, with algorithm.minibatches or epochs above 1.",
     "Fewer than minibatches * epochs: see train/minibatches_refused; or the last batch is small."),
    ("train/minibatches_refused", "minibatches", "sum",
     "Minibatches skipped because loss or gradient was not finite, or because every token was dropped.",
     "Now and then: a bad group. Often: lower trainer.optimizer.learning_rate."),
    ("train/ratio_mean", "1", "mean",
     "Importance ratio of trained to old policy, over tokens.",
     "Far from 1: the data is off policy; lower sampler.max_staleness."),
    ("train/ratio_min", "1", "min",
     "Smallest importance ratio of a token.",
     "Good: the ratio comes closer to 1."),
    ("train/ratio_max", "1", "max",
     "Largest importance ratio of a token.",
     "Some tokens are far off policy; lower sampler.max_staleness or cap the weights (tis_cap)."),
    ("train/clip_fraction_low", "fraction", "mean",
     "Tokens below the lower clip bound, which get no gradient (cispo: a gradient weighted by the bound).",
     "Data is too old or the learning rate too high."),
    ("train/clip_fraction_high", "fraction", "mean",
     "Tokens above the upper clip bound, which get no gradient (cispo: a gradient weighted by the bound).",
     "Data is too old or the learning rate too high."),
    ("train/entropy", "nats/token", "mean",
     "Entropy of the policy at the trained tokens, at the sampling temperature.",
     "A fall to nearly 0: raise algorithm.loss.clip_high or entropy_coef. A climb: noise."),
    ("train/kl_reference", "nats/token", "mean",
     "KL divergence from the reference policy.",
     "The policy leaves its start. If the reward does not rise, raise algorithm.loss.kl_coef."),
    ("train/kl_reward", "nats/token", "mean",
     "KL (k1) from the reference policy, subtracted from advantages (algorithm.loss.kl_reward_coef).",
     "As train/kl_reference; raise algorithm.loss.kl_reward_coef."),
    ("train/teacher_kl", "nats/token", "mean",
     "Reverse KL to the teacher, estimated from the sampled tokens.",
     "Should fall to 0. If not, the teacher is out of reach or the learning rate is low."),
    ("train/tis_weight_mean", "1", "mean",
     "Truncated importance weight between recomputed and generation logprobs.",
     "Far from 1: engine and trainer compute different policies; see off_policy/logprob_gap_mean."),
    ("train/clip_fraction_dual", "fraction", "mean",
     "Tokens with negative advantage that get no gradient because their ratio exceeds dual_clip.",
     "Some tokens are far off policy; lower sampler.max_staleness."),
    ("train/icepop_masked_fraction", "fraction", "mean",
     "Tokens not trained because their weight is outside icepop_band.",
     "Engine and trainer compute different policies, or the data is old; see staleness/."),
    ("train/sequence_masked_fraction", "fraction", "mean",
     "Sequences not trained because they are outside sequence_band.",
     "As train/icepop_masked_fraction. Near 1: the band is too narrow for model and staleness."),
    ("train/sequence_weight_mean", "1", "mean",
     "Importance weight of sequences, capped at sequence_cap; mean over tokens.",
     "Far below 1: long sequences hardly train; tis_cap corrects by token instead."),
    ("train/off_policy_masked_fraction", "fraction", "mean",
     "Sequences with negative advantage, not trained because they exceed off_policy_delta.",
     "Lower sampler.max_staleness, or raise algorithm.loss.off_policy_delta."),
    ("train/zero_variance_groups", "fraction", "mean",
     "Groups whose samples all have the same reward: no signal.",
     "Prompts are too easy or too hard. Change the data or draw more samples."),
    ("train/bridge_bytes", "bytes", "sum",
     "Features and gradients sent between encoder and language ranks (trainer.encoder).",
     "More or larger pictures; samples of a group share them."),
    ("train/bridge_s", "s", "sum",
     "Longest time that a rank spent receiving features or gradients, waiting included.",
     "Above half of time/train_s: one side waits for the other; see docs/encoder-ranks.md."),
)

_LOSS: Final[tuple[Row, ...]] = (
    ("loss/NAME", "1", "mean",
     "Value NAME from the function in `algorithm.loss.target`, mean over trained tokens.",
     "Depends on the function."),
)

_MOE: Final[tuple[Row, ...]] = (
    ("moe/load_max", "1", "last",
     "Tokens of the busiest expert, divided by the mean per expert in its layer; maximum over layers.",
     "Far above 1: ranks wait. Set trainer.moe.bias_update_rate or load_balancing_coef."),
    ("moe/load_max_mean", "1", "last",
     "The same for each layer, mean over layers.",
     "As moe/load_max. If only moe/load_max is high, one layer is to blame."),
    ("moe/router_entropy", "nats/token", "last",
     "Entropy of the router scores, mean over tokens and layers.",
     "A fall to nearly 0: routers no longer explore; raise trainer.moe.z_loss_coef."),
    ("moe/idle_experts", "fraction", "last",
     "Share of experts, over all layers, that no token chose in the step.",
     "In long steps: dead experts; raise trainer.moe.load_balancing_coef. In short ones: chance."),
    ("moe/load_balancing_loss", "1", "last",
     "Load balancing loss before trainer.moe.load_balancing_coef, mean over tokens and expert layers.",
     "1 is even load. It follows moe/load_max one optimizer step later."),
    ("moe/z_loss", "nats^2", "last",
     "Router z-loss before trainer.moe.z_loss_coef, mean over tokens and expert layers.",
     "Router logits grow, which rounds badly in 16 bits: set trainer.moe.z_loss_coef."),
)

_OFF_POLICY: Final[tuple[Row, ...]] = (
    ("off_policy/staleness_mean", "versions", "mean",
     "Weight versions between the oldest token of a sample and its training.",
     "Generators run far ahead; fine up to the bound if the reward holds."),
    ("off_policy/staleness_max", "versions", "max",
     "Staleness of the oldest sample trained in the step.",
     "Long rollouts raise it, up to sampler.max_staleness: see rollout/generate_s_mean."),
    ("off_policy/logprob_gap_mean", "nats", "mean",
     "Distance between the trainer's and the engine's logprob of a token.",
     "At staleness 0 it should be near 0; else dtype, kernels or sampling settings differ."),
    ("off_policy/logprob_gap_max", "nats", "max",
     "Largest distance between the trainer's and the engine's logprob of one token.",
     "A broken token: compare the engine's sampling settings with the trainer's temperature."),
    ("off_policy/logprob_gap_on_policy", "nats", "pooled",
     "As logprob_gap_mean, but only for samples from the weights being trained; absent without any.",
     "Engine and trainer differ with the same weights. See sync.max_logprob_gap."),
    ("off_policy/on_policy_tokens", "tokens", "sum",
     "Number of tokens in off_policy/logprob_gap_on_policy.",
     "Fine. If it stays at 0, only canaries compare engine and trainer (sync.canary_interval)."),
    ("off_policy/behaviour_kl", "nats/token", "mean",
     "KL divergence between the sampling policy and the trained policy.",
     "Lower sampler.max_staleness, sync more often, or lower the learning rate."),
)

_BY_STALENESS: Final[tuple[Row, ...]] = (
    *((f"ratio_p{q:02d}", "1", "pooled",
       f"Percentile {q} of the ratio exp(trained - generation logprob), for tokens",
       "Far from 1: this data is off policy. At age 0: engine and trainer differ.")
      for q in PERCENTILES),
    ("clip_fraction", "fraction", "pooled",
     "Share at a clip bound, for tokens",
     "Data of this age teaches little; lower sampler.max_staleness."),
    ("behaviour_kl", "nats/token", "pooled",
     "KL divergence between the sampling and the trained policy, for tokens",
     "Grows with age: lower sampler.max_staleness, or the learning rate."),
    ("ess", "fraction", "pooled",
     "Effective sample size over count, weighted by exp(trained - generation logprob), for tokens",
     "Good; 1 is on policy. Far below: a few tokens carry all the weight."),
    ("token_fraction", "fraction", "pooled",
     "Share of the step's tokens that are",
     "More of the step's data has this age."),
)
_STALENESS: Final[tuple[Row, ...]] = tuple(
    (
        metric_name(name, label),
        unit,
        how,
        f"{meaning} of the age in the name.",
        rises,
    )
    for name, unit, how, meaning, rises in _BY_STALENESS
    for label in LABELS
)

TRAINING: Final[tuple[Row, ...]] = (*_TRAIN, *_LOSS, *_MOE, *_OFF_POLICY, *_STALENESS)
# fmt: on
