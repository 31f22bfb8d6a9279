"""Defines section ``algorithm.loss`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, RecipePath, default_choice

Ratio = Annotated[float, Field(ge=0)]
Normalize = Literal["tokens", "sequences", "constant"]


class AnyLossConfig(Config):
    """Keys of every loss: what it is divided by, the KL penalty and the entropy bonus."""

    normalize: Normalize = "tokens"
    """Divide the summed loss by the step's valid tokens; or average each sequence first; or
    divide by ``constant_tokens`` for each sequence. tokens gives long sequences more weight,
    sequences gives their tokens less, constant does neither but depends on the constant."""

    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """normalize=constant: what each sequence counts for; None:
    `generator.sampling.max_new_tokens`. A larger one makes all steps smaller, as a lower
    learning rate would."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the frozen initial model. More keeps the policy close to it
    and learns less; above 0 a reference is loaded, and runs a forward pass per step."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL. k1 is unbiased and noisy, k2 and k3 are never negative; k3 is the
    usual one."""

    kl_clamp: Annotated[float, Field(gt=0)] | None = None
    """Bound on the absolute value of one token's KL, which has no gradient beyond; 10 is usual. A
    bound keeps one token that the reference finds likely from deciding the step, and lets tokens
    that are further off drift unpunished."""

    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy of the policy at the trained tokens, which is added to what is
    maximised. A little keeps the policy from settling on one answer too early, more makes it write
    noise; watch `train/entropy`, which is there in any case."""

    @property
    def needs_policy_logprobs(self) -> bool:
        """Return whether the trainer computes its own logprobs in a pass before the step."""
        return False

    @property
    def needs_reference_logprobs(self) -> bool:
        """Return whether the trainer computes the initial model's logprobs before the step."""
        return self.kl_coef > 0

    @property
    def teacher_path(self) -> str | None:
        """Return the model whose logprobs the trainer computes before the step; None without one."""
        return None


class PolicyGradientLossConfig(AnyLossConfig):
    """Keys of the losses with an importance ratio: its denominator and the off-policy corrections."""

    old_logprobs: Literal["generation", "policy", "current"] = "generation"
    """Denominator of the ratio: generation takes the engine's logprobs, policy recomputes the
    trainer's in a pass before the step, current reads them off the training pass. generation
    costs nothing but counts differences between engine and trainer as policy change; policy
    costs a forward pass; current is free and makes the ratio exactly 1."""

    kl_gradient: Literal["estimator", "unbiased"] = "estimator"
    """Gradient of the KL penalty. estimator differentiates ``kl_kind`` alone, which is not the
    gradient of the KL; unbiased weighs it with the ratio exp(logprob - old), whose own gradient
    makes it so, for k1 and k3. unbiased holds to the initial model on both sides, where k3 alone
    pulls exponentially towards tokens that only it finds likely; it varies with the ratio."""

    kl_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty in the reward: each token's advantage loses this times old -
    reference logprob. It has no gradient of its own, so the clip range and the corrections hold it
    too; ``kl_coef`` pulls where they would not. Costs a reference, as ``kl_coef`` does."""

    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the truncated importance weight exp(old - generation); needs ``old_logprobs``
    other than generation, as the two bands below. A higher cap corrects more and is noisier."""

    icepop_band: tuple[Ratio, Ratio] | None = None
    """A token's weight is exp(old - generation) inside this band, as in [0.5, 5], and 0 outside
    it. A narrow band trains only where engine and trainer agree, and drops more tokens."""

    sequence_band: tuple[Ratio, Ratio] | None = None
    """A sequence is dropped from the step if its exp(old - generation) leaves this band. A
    narrow band keeps the step on-policy and drops more samples, long ones first."""

    sequence_statistic: Literal["geometric", "product"] = "geometric"
    """Ratio of a sequence that ``sequence_band`` bounds: the geometric mean over its tokens, or
    their product. The product is the exact importance weight and varies more the longer the
    sequence; the mean needs a far narrower band."""

    sequence_weights: bool = False
    """A sequence that ``sequence_band`` keeps weighs its exp(old - generation) instead of 1;
    needs ``sequence_statistic`` product. On removes bias, and a few sequences may then dominate
    the step."""

    sequence_cap: Annotated[float, Field(gt=0)] | None = None
    """All tokens of a sequence weigh the product of their exp(old - generation), at most this.
    It corrects the whole sequence where ``tis_cap`` corrects each token; long sequences fall far
    below the cap or reach it, so the step rests on fewer of them."""

    off_policy_delta: Annotated[float, Field(gt=0)] | None = None
    """A sequence of negative advantage is dropped if its mean of generation - logprob, in nats per
    token, is above this. Lower spares the policy more samples that it would no longer write, and
    learns less from mistakes."""

    count_dropped: bool = True
    """Count what a band or ``off_policy_delta`` dropped in the divisor of the loss; off: the loss is
    the mean over what was kept, KL penalty included. On makes steps with many drops smaller, off
    keeps their size."""

    teacher: RecipePath | None = None
    """Model directory of a frozen teacher with the tokenizer of `model.path`, relative to the
    recipe: on-policy distillation. Before each step it scores the sampled tokens, and each one's
    advantage is ``teacher_coef * (teacher - old logprob)``, which descends the reverse KL. It costs
    the teacher's memory in each rank of the torch trainer and a forward pass per step."""

    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the teacher's part of the advantage, with ``teacher``. More follow the teacher
    harder where rewards count too; alone it scales the step as the learning rate does."""

    teacher_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the reward's advantage, which is added to the teacher's, with ``teacher``. 0 learns
    from the teacher alone; more let rewards correct it."""

    step_std: bool = False
    """Divide the step's advantages by their standard deviation over its samples. On makes the
    size of steps independent of the scale of rewards, and enlarges steps with little signal."""

    @property
    def needs_policy_logprobs(self) -> bool:
        return self.old_logprobs == "policy"

    @property
    def needs_reference_logprobs(self) -> bool:
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def teacher_path(self) -> str | None:
        return self.teacher


class ClipRangeLossConfig(PolicyGradientLossConfig):
    """Keys of the losses that clip the importance ratio."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low. A larger range learns more from each step and
    is less stable."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high. A larger range lets unlikely tokens grow
    faster, which keeps exploration up and is less stable."""


class PessimisticLossConfig(ClipRangeLossConfig):
    """Keys of the losses that take the lower of a clipped and an unclipped objective."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage pulls no further once its ratio is above this; 3 is a usual
    choice. Lower limits the harm of very off-policy tokens, and ignores more of them."""


class ClippedPgLossConfig(PessimisticLossConfig):
    """PPO's surrogate without a value head, one ratio per token."""

    name: Literal["clipped_pg"] = "clipped_pg"
    """Loss of a step; docs/algorithms.md has the formulas."""


class GspoLossConfig(PessimisticLossConfig):
    """PPO's surrogate with one ratio per sequence: steadier for mixtures of experts and long samples."""

    name: Literal["gspo"] = "gspo"
    """Loss of a step; docs/algorithms.md has the formulas."""


class CispoLossConfig(ClipRangeLossConfig):
    """A bounded importance weight that never takes a gradient away, so that rare tokens keep theirs."""

    name: Literal["cispo"] = "cispo"
    """Loss of a step; docs/algorithms.md has the formulas."""


class SapoLossConfig(PolicyGradientLossConfig):
    """A smooth gate in the place of the clip range: the further off the ratio, the less gradient."""

    name: Literal["sapo"] = "sapo"
    """Loss of a step; docs/algorithms.md has the formulas."""

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Steepness of the gate for tokens of positive advantage. A larger one trusts only ratios
    near 1 and learns less from the rest."""

    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Steepness of the gate for the other tokens. Above ``tau_positive`` it lets go of punished
    tokens sooner, which is steadier and unlearns less."""


class SftLossConfig(AnyLossConfig):
    """Imitates every sample, whatever its reward."""

    name: Literal["sft"] = "sft"
    """Loss of a step; docs/algorithms.md has the formulas."""


LossConfig = Annotated[
    ClippedPgLossConfig | GspoLossConfig | CispoLossConfig | SapoLossConfig | SftLossConfig,
    Field(discriminator="name"),
    default_choice("name", "clipped_pg"),
]
