"""Defines section ``algorithm.loss`` of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, Options, RecipePath, default_choice
from offbeat.config.hub_path import is_on_hub
from offbeat.config.problems import Clash, target_clashes

_LOSS = "algorithm.loss"

Ratio = Annotated[float, Field(ge=0)]
Normalize = Literal["tokens", "sequences", "constant"]


def _written(band: tuple[float, float]) -> str:
    return f"[{band[0]:g}, {band[1]:g}]"


class AnyLossConfig(Config):
    """Keys of every loss: its divisor, the KL penalty and the entropy bonus."""

    normalize: Normalize = "tokens"
    """Divisor of the summed loss. tokens: valid tokens of the step. sequences: first the mean of
    each sequence. constant: `constant_tokens` per sequence."""

    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """With `normalize=constant`: token count used for every sequence, whatever its length. null:
    `generator.sampling.max_new_tokens`."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the initial model. Above 0, a reference model is loaded and runs
    one forward pass per step."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL. k1 is unbiased and noisy; k2 and k3 are never negative."""

    kl_clamp: Annotated[float, Field(gt=0)] | None = None
    """Maximum absolute KL of one token. Beyond it the token has no KL gradient. 10 is usual."""

    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus. A small bonus keeps exploration; a large one produces noise.
    `train/entropy` is logged in any case."""

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
        """Return the teacher's path, or None. The trainer computes its logprobs before a step."""
        return None

    def find_clashes(self) -> Iterator[Clash]:
        yield from self._a_kl_penalty_is_there()
        yield from self._a_constant_has_a_use()

    def _a_kl_penalty_is_there(self) -> Iterator[Clash]:
        changed = self.model_dump(
            include={"kl_kind", "kl_clamp", "kl_gradient"}, exclude_defaults=True
        )
        for name, value in changed.items() if not self.kl_coef else ():
            yield Clash(
                (f"{_LOSS}.{name}", f"{_LOSS}.kl_coef"),
                f"{_LOSS}.{name}={value} is not used: {_LOSS}.kl_coef=0",
                f"Set {_LOSS}.kl_coef to more than 0, or leave {_LOSS}.{name} out.",
            )

    def _a_constant_has_a_use(self) -> Iterator[Clash]:
        if self.constant_tokens is not None and self.normalize != "constant":
            yield Clash(
                (f"{_LOSS}.constant_tokens", f"{_LOSS}.normalize"),
                f"{_LOSS}.constant_tokens={self.constant_tokens} is not used: {_LOSS}.normalize="
                f"{self.normalize}",
                f"Set {_LOSS}.normalize to constant, or leave {_LOSS}.constant_tokens out.",
            )


class PolicyGradientLossConfig(AnyLossConfig):
    """Keys of the losses with an importance ratio: its denominator and the off-policy corrections."""

    old_logprobs: Literal["generation", "policy", "current"] = "generation"
    """Logprobs in the denominator of the ratio. generation: from the engine, at no cost, but
    differences between engine and trainer then count as policy change. policy: recomputed by the
    trainer before the step. current: from the training pass itself, so the ratio is 1."""

    kl_gradient: Literal["estimator", "unbiased"] = "estimator"
    """Gradient of the KL penalty. estimator: derivative of `kl_kind`, which is not the gradient of
    the KL. unbiased: that derivative weighted by exp(logprob - old), for k1 and k3."""

    kl_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a KL penalty in the reward: this times (old - reference logprob) is subtracted from
    each token's advantage. Clipping and corrections apply to it. Needs a reference."""

    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the truncated importance weight exp(old - generation). Like `icepop_band`,
    `sequence_band` and `sequence_cap`, it needs `old_logprobs` other than generation."""

    icepop_band: tuple[Ratio, Ratio] | None = None
    """Weight each token by exp(old - generation) inside this band, such as [0.5, 5], and by 0
    outside."""

    sequence_band: tuple[Ratio, Ratio] | None = None
    """Drop a sequence from the step if its exp(old - generation) is outside this band."""

    sequence_statistic: Literal["geometric", "product"] = "geometric"
    """Ratio of a sequence for `sequence_band`. geometric: geometric mean over its tokens, which
    needs a far narrower band. product: the exact ratio, which varies with length."""

    sequence_weights: bool = False
    """Weight each kept sequence by exp(old - generation) instead of 1. This removes bias, but a few
    sequences may dominate. Needs `sequence_statistic` product."""

    sequence_cap: Annotated[float, Field(gt=0)] | None = None
    """Weight all tokens of a sequence by the product of their exp(old - generation), capped at this.
    Long sequences reach the cap or nearly vanish."""

    off_policy_delta: Annotated[float, Field(gt=0)] | None = None
    """Drop a sequence with negative advantage if its mean (generation - logprob), in nats per
    token, exceeds this."""

    count_dropped: bool = True
    """Whether the divisor of the loss counts tokens that a band or `off_policy_delta` dropped.
    false: take the mean over the other tokens, for the KL penalty too."""

    teacher: RecipePath | None = None
    """Directory of a frozen teacher for on-policy distillation, relative to the recipe. The teacher
    must have the tokenizer of `model.path`. A token's advantage is `teacher_coef * (teacher - old
    logprob)`. Each rank of the torch trainer holds the teacher and runs one forward pass per
    step."""

    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the teacher's part of the advantage."""

    teacher_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the reward's advantage, added to the teacher's. 0: learn only from the teacher."""

    step_std: bool = False
    """Divide the advantages of a step by their standard deviation over the step's samples."""

    @property
    def needs_policy_logprobs(self) -> bool:
        return self.old_logprobs == "policy"

    @property
    def needs_reference_logprobs(self) -> bool:
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def teacher_path(self) -> str | None:
        return self.teacher

    def find_clashes(self) -> Iterator[Clash]:
        yield from self._corrections_have_something_to_correct()
        yield from self._bands_hold_what_is_on_policy()
        yield from self._the_cap_is_inside_the_band()
        yield from self._a_sequence_has_one_weight()
        yield from self._the_kl_has_one_gradient()
        yield from self._a_deviation_divides_advantages_only()
        yield from self._a_teacher_is_there()
        yield from super().find_clashes()

    def _corrections(self) -> dict[str, str]:
        """Return the active corrections, as written."""
        caps = {"tis_cap": self.tis_cap, "sequence_cap": self.sequence_cap}
        written = {name: f"{cap:g}" for name, cap in caps.items() if cap is not None}
        return written | {name: _written(band) for name, band in self._bands()}

    def _bands(self) -> list[tuple[str, tuple[float, float]]]:
        bands = {"icepop_band": self.icepop_band, "sequence_band": self.sequence_band}
        return [(name, band) for name, band in bands.items() if band is not None]

    def _corrections_have_something_to_correct(self) -> Iterator[Clash]:
        for name, value in self._corrections().items():
            if self.old_logprobs == "generation":
                yield Clash(
                    (f"{_LOSS}.{name}", f"{_LOSS}.old_logprobs"),
                    f"{_LOSS}.{name}={value} has nothing to correct with "
                    f"{_LOSS}.old_logprobs={self.old_logprobs}: it weighs by exp(old - generation logprob), "
                    "which is 1",
                    f"Set {_LOSS}.old_logprobs to policy or current, or leave {_LOSS}.{name} out.",
                )

    def _bands_hold_what_is_on_policy(self) -> Iterator[Clash]:
        for name, band in self._bands():
            if not band[0] < 1 < band[1]:
                yield Clash(
                    (f"{_LOSS}.{name}",),
                    f"{_LOSS}.{name}={_written(band)} does not contain 1: it would drop exactly "
                    "the tokens on which engine and trainer agree",
                    "Write the lower bound first, under 1, and the upper one over 1, as in [0.5, 5].",
                )

    def _the_cap_is_inside_the_band(self) -> Iterator[Clash]:
        cap, band = self.tis_cap, self.icepop_band
        if cap is not None and band is not None and cap >= band[1]:
            yield Clash(
                (f"{_LOSS}.tis_cap", f"{_LOSS}.icepop_band"),
                f"{_LOSS}.tis_cap={cap:g} never caps anything: {_LOSS}.icepop_band={_written(band)} drops "
                "a token before its weight reaches the cap",
                f"Set {_LOSS}.tis_cap to less than {band[1]:g}, or leave it out.",
            )

    def _a_sequence_has_one_weight(self) -> Iterator[Clash]:
        by_token = {
            name: value
            for name, value in self._corrections().items()
            if name in ("tis_cap", "icepop_band")
        }
        weights = {"sequence_weights": "true"} if self.sequence_weights else {}
        for name, value in (by_token | weights).items() if self.sequence_cap is not None else ():
            yield Clash(
                (f"{_LOSS}.sequence_cap", f"{_LOSS}.{name}"),
                f"{_LOSS}.sequence_cap={self.sequence_cap:g} and {_LOSS}.{name}={value} correct for the same "
                "difference twice",
                "Leave one of them out.",
            )
        if not self.sequence_weights:
            return
        if self.sequence_band is None or self.sequence_statistic != "product":
            yield Clash(
                (f"{_LOSS}.sequence_weights", f"{_LOSS}.sequence_band"),
                f"{_LOSS}.sequence_weights=true has no weight to give: the importance weight of a sequence is "
                "the product of its tokens', and only a band bounds it",
                f"Set {_LOSS}.sequence_statistic to product and {_LOSS}.sequence_band to its bounds, as in "
                f"[0, 2], or leave {_LOSS}.sequence_weights out.",
            )
        for name, value in by_token.items():
            yield Clash(
                (f"{_LOSS}.sequence_weights", f"{_LOSS}.{name}"),
                f"{_LOSS}.sequence_weights=true and {_LOSS}.{name}={value} correct for the same difference "
                "twice: by sequence and by token",
                "Leave one of them out.",
            )

    def _the_kl_has_one_gradient(self) -> Iterator[Clash]:
        if self.kl_gradient == "unbiased" and self.kl_coef and self.kl_kind == "k2":
            yield Clash(
                (f"{_LOSS}.kl_gradient", f"{_LOSS}.kl_kind"),
                f"{_LOSS}.kl_gradient=unbiased cannot be combined with {_LOSS}.kl_kind=k2: the mean of k2 is "
                "not the KL, and its own gradient already pulls as the KL does",
                f"Set {_LOSS}.kl_kind to k3, or {_LOSS}.kl_gradient to estimator.",
            )

    def _a_deviation_divides_advantages_only(self) -> Iterator[Clash]:
        """Refuse ``step_std`` for other losses.

        The deviation is known only when the step is complete, and divides the step's whole
        gradient.
        """
        if not self.step_std:
            return
        if self.kl_coef:
            yield Clash(
                (f"{_LOSS}.step_std", f"{_LOSS}.kl_coef"),
                f"{_LOSS}.step_std=true would divide the KL penalty of {_LOSS}.kl_coef={self.kl_coef:g} too: "
                "the deviation is known only when the gradients of both have been added up",
                f"Set {_LOSS}.kl_coef to 0, or {_LOSS}.step_std to false.",
            )
        if self.kl_reward_coef:
            yield Clash(
                (f"{_LOSS}.step_std", f"{_LOSS}.kl_reward_coef"),
                f"{_LOSS}.step_std=true assumes that the mean of the step's advantages is 0, "
                f"but {_LOSS}.kl_reward_coef={self.kl_reward_coef:g} moves it",
                f"Set {_LOSS}.kl_reward_coef to 0, or {_LOSS}.step_std to false.",
            )
        if self.entropy_coef:
            yield Clash(
                (f"{_LOSS}.step_std", f"{_LOSS}.entropy_coef"),
                f"{_LOSS}.step_std=true would divide the bonus of {_LOSS}.entropy_coef="
                f"{self.entropy_coef:g} too",
                f"Set {_LOSS}.entropy_coef to 0, or {_LOSS}.step_std to false.",
            )
        if self.teacher is not None:
            yield Clash(
                (f"{_LOSS}.step_std", f"{_LOSS}.teacher"),
                f"{_LOSS}.step_std=true would divide the teacher's part by the deviation of the rewards' "
                "advantages, which is 0 where they are equal",
                f"Set {_LOSS}.step_std to false, or leave {_LOSS}.teacher out.",
            )

    def _a_teacher_is_there(self) -> Iterator[Clash]:
        if self.teacher is None:
            for name in self.model_dump(
                include={"teacher_coef", "teacher_reward_coef"}, exclude_defaults=True
            ):
                yield Clash(
                    (f"{_LOSS}.{name}", f"{_LOSS}.teacher"),
                    f"{_LOSS}.{name} is not used without {_LOSS}.teacher",
                    f"Set {_LOSS}.teacher to a model directory, or leave {_LOSS}.{name} out.",
                )
        elif is_on_hub(self.teacher):
            yield Clash(
                (f"{_LOSS}.teacher",),
                f"{_LOSS}.teacher={self.teacher} is not downloaded: it must be a directory",
                "Download it with offbeat stage OWNER/NAME --to DIRECTORY, and name that.",
            )


class ClipRangeLossConfig(PolicyGradientLossConfig):
    """Keys of the losses that clip the importance ratio."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Clip the ratio below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Clip the ratio above at 1 + clip_high. A larger value lets unlikely tokens grow faster."""


class PessimisticLossConfig(ClipRangeLossConfig):
    """Keys of the losses that take the lower of a clipped and an unclipped objective."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Above this ratio, a token with negative advantage has no gradient. 3 is usual."""

    def find_clashes(self) -> Iterator[Clash]:
        yield from self._dual_clip_is_outside_the_clip_range()
        yield from super().find_clashes()

    def _dual_clip_is_outside_the_clip_range(self) -> Iterator[Clash]:
        dual = self.dual_clip
        if dual is not None and dual <= 1 + self.clip_high:
            yield Clash(
                (f"{_LOSS}.dual_clip", f"{_LOSS}.clip_high"),
                f"{_LOSS}.dual_clip={dual:g} is inside the clip range, which ends at "
                f"{1 + self.clip_high:g}: it would stop tokens that have not moved far",
                f"Set {_LOSS}.dual_clip to more than {1 + self.clip_high:g}; 3 is a usual choice.",
            )


class ClippedPgLossConfig(PessimisticLossConfig):
    """PPO's surrogate without a value head, one ratio per token."""

    name: Literal["clipped_pg"] = "clipped_pg"
    """Loss of a step; docs/algorithms.md has the formulas."""


class GspoLossConfig(PessimisticLossConfig):
    """PPO's surrogate with one ratio per sequence: steadier for mixtures of experts and long samples."""

    name: Literal["gspo"] = "gspo"
    """Loss of a step; docs/algorithms.md has the formulas."""


class CispoLossConfig(ClipRangeLossConfig):
    """A bounded importance weight: every token keeps a gradient, even rare ones."""

    name: Literal["cispo"] = "cispo"
    """Loss of a step; docs/algorithms.md has the formulas."""


class SapoLossConfig(PolicyGradientLossConfig):
    """A smooth gate instead of a clip range: the gradient shrinks as the ratio moves away from 1."""

    name: Literal["sapo"] = "sapo"
    """Loss of a step; docs/algorithms.md has the formulas."""

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Steepness of the gate for positive advantages."""

    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Steepness of the gate for other tokens. With a value above `tau_positive`, training is
    steadier and unlearns less."""


class CustomLossConfig(PolicyGradientLossConfig):
    """Your module's loss per token. Masks, corrections, divisor and penalties of this section apply."""

    name: Literal["custom"] = "custom"
    """Loss of a step; docs/algorithms.md has the formulas."""

    target: str
    """`module:function`, importable from the working directory. It gets the tokens of a microbatch
    and `options`, and returns each token's loss. Setting `target` without `name` selects custom."""

    options: Options = {}
    """Second argument of the function."""

    reference: bool = False
    """Compute the initial model's logprobs for the function, even without a KL penalty."""

    @property
    def needs_reference_logprobs(self) -> bool:
        return self.reference or super().needs_reference_logprobs

    def find_clashes(self) -> Iterator[Clash]:
        hint = "Write module:function, as in my_loss:loss. algorithm.loss.name chooses a loss of offbeat."
        yield from target_clashes(f"{_LOSS}.target", self.target, "a function", hint)
        yield from super().find_clashes()


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
