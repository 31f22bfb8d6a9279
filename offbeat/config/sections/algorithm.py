"""Defines section ``algorithm`` of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Config, InWords
from offbeat.config.presets import PresetName, with_preset
from offbeat.config.problems import Clash
from offbeat.config.sections.loss import (
    ClippedPgLossConfig,
    LossConfig,
    PolicyGradientLossConfig,
)

AdvantageName = Literal["grpo", "grpo_no_std", "dr_grpo", "rloo", "grpo_loo", "pass_at_k"]
AdvantageTarget = Annotated[
    str, Field(pattern=r"^[^:\s]+:[^:\s]+$"), InWords("of the form module:function")
]


class AlgorithmConfig(Config):
    """Algorithm, from rewards to a gradient."""

    preset: PresetName | None = None
    """A published algorithm. It fills in the keys of this section that you omit. If an override, or
    a recipe that extends this one, names a different preset, the section is reset."""

    advantage: AdvantageName | AdvantageTarget = "grpo"
    """How a sample's reward is compared with its group. grpo: difference from the mean, divided by
    the group's standard deviation. grpo_no_std, dr_grpo: only the difference. rloo: difference from
    the mean of the other samples. grpo_loo: as rloo, divided by the other samples' standard
    deviation (NeMo-RL). pass_at_k: reward the best of several tries. `module:function`: your
    function, which gets a group's rewards, importable from the working directory."""

    pass_k: Annotated[int, Field(ge=1)] = 2
    """With `advantage=pass_at_k`: number of tries. Only the best one counts."""

    minibatches: Annotated[int, Field(ge=1)] = 1
    """Parts into which a step's groups are split. Each part gets an optimizer step, so later parts
    are slightly off-policy, within the clip range. Engines receive only the weights after the last
    part."""

    epochs: Annotated[int, Field(ge=1)] = 1
    """Number of times that a step trains on each of its groups. 1 to 4 are usual."""

    loss: LossConfig = ClippedPgLossConfig()
    """The policy-gradient loss."""

    @property
    def advantage_target(self) -> str | None:
        """Return the ``module:function`` of the user's estimator, or None for a built-in one."""
        return self.advantage if ":" in self.advantage else None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, given: object) -> object:
        return with_preset(given)

    def find_clashes(self) -> Iterator[Clash]:
        loss = self.loss
        if isinstance(loss, PolicyGradientLossConfig):
            yield from self._a_deviation_divides_advantages_only(loss)
            yield from self._old_logprobs_outlast_a_minibatch(loss)

    def _a_deviation_divides_advantages_only(
        self, loss: PolicyGradientLossConfig
    ) -> Iterator[Clash]:
        is_custom = self.advantage_target is not None
        if loss.step_std and (is_custom or self.advantage == "grpo_loo"):
            yield Clash(
                ("algorithm.loss.step_std", "algorithm.advantage"),
                "algorithm.loss.step_std=true assumes that the mean of the step's advantages "
                f"is 0, but advantages of algorithm.advantage={self.advantage} "
                f"{'may' if is_custom else 'do'} not cancel",
                "Set algorithm.advantage to grpo or rloo, or algorithm.loss.step_std to false.",
            )

    def _old_logprobs_outlast_a_minibatch(self, loss: PolicyGradientLossConfig) -> Iterator[Clash]:
        parts = {"minibatches": self.minibatches, "epochs": self.epochs}
        name, count = next(((name, n) for name, n in parts.items() if n > 1), ("", 1))
        if count > 1 and loss.old_logprobs == "current":
            yield Clash(
                ("algorithm.loss.old_logprobs", f"algorithm.{name}"),
                "algorithm.loss.old_logprobs=current is computed again before each optimizer step. "
                f"With algorithm.{name}={count}, every ratio would be 1, so clipping has no effect",
                f"Set algorithm.loss.old_logprobs to policy, or algorithm.{name} to 1.",
            )
