"""Defines section ``algorithm`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Config
from offbeat.config.presets import PresetName, with_preset
from offbeat.config.sections.loss import ClippedPgLossConfig, LossConfig


class AlgorithmConfig(Config):
    """Algorithm, from rewards to a gradient."""

    preset: PresetName | None = None
    """A published algorithm by its name: it fills in the keys of this section that are not
    given. A recipe or override that names another preset starts the section afresh."""

    advantage: Literal["grpo", "grpo_no_std", "dr_grpo", "rloo", "grpo_loo", "pass_at_k"] = "grpo"
    """Comparison of a sample's reward with its group's. grpo divides by the group's standard
    deviation, which gives easy and hard prompts more weight; grpo_no_std, dr_grpo and rloo do
    not; grpo_loo divides by that of the other samples, NeMo-RL's default, and favours rare
    rewards; pass_at_k rewards the best of several tries."""

    pass_k: Annotated[int, Field(ge=1)] = 2
    """advantage=pass_at_k: how many samples may try, the best of which counts. More reward
    variety over reliability."""

    minibatches: Annotated[int, Field(ge=1)] = 1
    """Parts that the groups of a step are divided into, with an optimizer step for each. More learn
    more from the same samples, from smaller and noisier gradients; the later ones are off-policy by
    those before, which the clip range bounds. Engines get the weights after the last one."""

    epochs: Annotated[int, Field(ge=1)] = 1
    """Times that a step trains each of its groups. More use samples that are dear further, and move
    the policy away from the one that drew them; 1 to 4 are usual."""

    loss: LossConfig = ClippedPgLossConfig()
    """The policy-gradient loss."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, given: object) -> object:
        return with_preset(given)
