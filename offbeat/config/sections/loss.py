"""Defines section ``algorithm.loss`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, Options, RecipePath, default_choice

Ratio = Annotated[float, Field(ge=0)]
Normalize = Literal["tokens", "sequences", "constant"]


class AnyLossConfig(Config):
    """Keys of every loss: what it is divided by, the KL penalty and the entropy bonus."""

    normalize: Normalize = "tokens"
    """Divisor of the summed loss. tokens: valid tokens of the step. sequences: mean of each
    sequence first. constant: `constant_tokens` per sequence."""

    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """normalize=constant: tokens that each sequence counts as. null:
    `generator.sampling.max_new_tokens`."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the initial model. Above 0 a reference is loaded, with one
    forward pass per step."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. k1 is unbiased and noisy; k2 and k3 are never negative."""

    kl_clamp: Annotated[float, Field(gt=0)] | None = None
    """Bound on the absolute KL of one token, beyond which it has no gradient; 10 is usual."""

    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus. A little keeps exploration; more produces noise. `train/entropy`
    always shows it."""

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
    """Denominator of the ratio. generation: logprobs of the engine, free, but engine differences
    count as policy change. policy: recomputed by the trainer before the step. current: from the
    training pass, so the ratio is 1."""

    kl_gradient: Literal["estimator", "unbiased"] = "estimator"
    """Gradient of the KL penalty. estimator: derivative of `kl_kind`, which is not the gradient of
    the KL. unbiased: weighted by exp(logprob - old), for k1 and k3."""

    kl_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty in the reward: each token's advantage loses this times old -
    reference logprob. Clipping and corrections apply to it. It needs a reference."""

    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the truncated importance weight exp(old - generation). This and the bands need
    `old_logprobs` other than generation."""

    icepop_band: tuple[Ratio, Ratio] | None = None
    """Weight of a token: exp(old - generation) inside the band, 0 outside, as in [0.5, 5]."""

    sequence_band: tuple[Ratio, Ratio] | None = None
    """Drop a sequence from the step if its exp(old - generation) is outside."""

    sequence_statistic: Literal["geometric", "product"] = "geometric"
    """Ratio that `sequence_band` bounds: geometric mean over the tokens, or product. The product is
    exact but varies with length; the mean needs a far narrower band."""

    sequence_weights: bool = False
    """Weigh a kept sequence by exp(old - generation) instead of 1; needs `sequence_statistic`
    product. Removes bias, but few sequences may dominate."""

    sequence_cap: Annotated[float, Field(gt=0)] | None = None
    """Weigh all tokens of a sequence by the product of their exp(old - generation), at most this.
    Long sequences reach the cap or nearly vanish."""

    off_policy_delta: Annotated[float, Field(gt=0)] | None = None
    """Drop a sequence with negative advantage if its mean generation - logprob, in nats per token,
    exceeds this."""

    count_dropped: bool = True
    """Count what a band or `off_policy_delta` dropped in the divisor of the loss. false: mean over
    the rest, KL penalty included."""

    teacher: RecipePath | None = None
    """Directory of a frozen teacher with the tokenizer of `model.path`, relative to the recipe:
    on-policy distillation. The advantage of a token is `teacher_coef * (teacher - old logprob)`.
    Each rank of the torch trainer holds the teacher, with one forward pass per step."""

    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the teacher's part of the advantage."""

    teacher_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the reward's advantage, added to the teacher's. 0: learn only from the teacher."""

    step_std: bool = False
    """Divide the advantages of a step by their standard deviation over its samples."""

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
    """Clip the ratio below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Clip the ratio above at 1 + clip_high. A larger value lets unlikely tokens grow faster."""


class PessimisticLossConfig(ClipRangeLossConfig):
    """Keys of the losses that take the lower of a clipped and an unclipped objective."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token with negative advantage has no gradient above this ratio; 3 is usual."""


class ClippedPgLossConfig(PessimisticLossConfig):
    """PPO's surrogate without a value head, one ratio per token."""

    name: Literal["clipped_pg"] = "clipped_pg"
    """Loss of a step; docs/algorithms.md has the formulas."""


class GspoLossConfig(PessimisticLossConfig):
    """PPO's surrogate with one ratio per sequence: steadier for mixtures of experts and long samples."""

    name: Literal["gspo"] = "gspo"
    """Loss of a step; docs/algorithms.md has the formulas."""


class CispoLossConfig(ClipRangeLossConfig):
    """A bounded importance weight: every token keeps a gradient, rare ones too."""

    name: Literal["cispo"] = "cispo"
    """Loss of a step; docs/algorithms.md has the formulas."""


class SapoLossConfig(PolicyGradientLossConfig):
    """A smooth gate instead of a clip range: the gradient shrinks with the ratio's distance from 1."""

    name: Literal["sapo"] = "sapo"
    """Loss of a step; docs/algorithms.md has the formulas."""

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Steepness of the gate for positive advantages."""

    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Steepness of the gate for other tokens. Above `tau_positive` it is steadier and unlearns
    less."""


class CustomLossConfig(PolicyGradientLossConfig):
    """A loss of each token from your module; masks, corrections, divisor and penalties stay here."""

    name: Literal["custom"] = "custom"
    """Loss of a step; docs/algorithms.md has the formulas."""

    target: str
    """`module:function`, importable from the working directory. It is called with the tokens of a
    microbatch and `options`, and returns the loss of each token. Given without `name`, it chooses
    custom."""

    options: Options = {}
    """Second argument of the function."""

    reference: bool = False
    """Compute the initial model's logprobs for the function, also without a KL penalty."""

    @property
    def needs_reference_logprobs(self) -> bool:
        return self.reference or super().needs_reference_logprobs


class SftLossConfig(AnyLossConfig):
    """Imitate every sample, whatever its reward."""

    name: Literal["sft"] = "sft"
    """Loss of a step; docs/algorithms.md has the formulas."""


LossConfig = Annotated[
    ClippedPgLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | SftLossConfig
    | CustomLossConfig,
    Field(discriminator="name"),
    default_choice("name", "clipped_pg"),
]
