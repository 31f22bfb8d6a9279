"""Defines section ``algorithm.loss`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config

Ratio = Annotated[float, Field(ge=0)]


class LossConfig(Config):
    """The policy-gradient loss and its off-policy corrections.

    Docs/algorithms.md has the formulas.
    """

    name: Literal["clipped_pg", "gspo", "cispo", "sft"] = "clipped_pg"
    """clipped_pg: PPO's surrogate without a value head, a ratio a token; gspo.

    The same with one ratio a
    sequence; cispo: a bounded importance weight that never takes a gradient away; sft: imitate every
    sample, whatever its reward."""

    old_logprobs: Literal["generation", "policy", "current"] = "generation"
    """Denominator of the ratio.

    The engine's logprobs, or the trainer's own at the weights the step begins
    with. policy recomputes those in a pass before the step; current reads them off the training pass
    itself, which costs nothing and makes the ratio exactly 1."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage pulls no further once its ratio is above this.

    3 is a usual choice.
    """

    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the truncated importance weight exp(old - generation).

    Needs ``old_logprobs`` other than
    generation, as the two bands below."""

    icepop_band: tuple[Ratio, Ratio] | None = None
    """A token's weight is exp(old - generation) inside this band, as in [0.5, 5], and 0 outside it."""

    sequence_band: tuple[Ratio, Ratio] | None = None
    """A sequence is dropped from the step if its exp(old - generation) leaves this band."""

    sequence_statistic: Literal["geometric", "product"] = "geometric"
    """What stands for a sequence in ``sequence_band``.

    The geometric mean of its tokens or their product.
    """

    sequence_weights: bool = False
    """A sequence that ``sequence_band`` keeps weighs its exp(old - generation) instead of 1. Needs
    ``sequence_statistic`` product: the geometric mean is no importance weight."""

    count_dropped: bool = True
    """What a band dropped still counts in what the loss is divided by; off.

    The loss is the mean over what
    was kept, KL penalty included."""

    normalize: Literal["tokens", "sequences", "constant"] = "tokens"
    """Divide the summed loss by the step's valid tokens; or average each sequence first.

    Or divide by
    ``constant_tokens`` for each sequence, so that a step's weight does not depend on its lengths."""

    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """normalize=constant: what each sequence counts for. None.

    Generator.sampling.max_new_tokens.
    """

    step_std: bool = False
    """Divide the step's advantages by their standard deviation over its samples."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the frozen initial model. 0 loads no reference."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
