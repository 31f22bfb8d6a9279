"""Says what the messages between encoder ranks and language ranks take (``trainer.encoder``)."""

from typing import TYPE_CHECKING, Final

from offbeat.config.mixture import environment_views, key_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import MEDIA_LIMIT
from offbeat.launch.checks.finding import size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from offbeat.multimodal.rules import MediaRules

_TOKENS: Final = 1000


def messages_said(config: RunConfig, model: "PreTrainedConfig", *, trains_tower: bool) -> str:
    """Return the bytes of features and of their gradients in a chunk, as a part of a finding.

    A chunk has the groups of a step at most, each with the media of one prompt.

    Args:
        config: The recipe.
        model: Config of its model, which reads media.
        trains_tower: Whether gradients are sent back.
    """
    import torch  # which takes seconds, and a recipe without encoder ranks need not load it

    from offbeat.multimodal.rules import media_rules
    from offbeat.trainers.grid.bridge_bytes import bridge_bytes

    rules = media_rules(model)

    def said(tokens: int) -> str:
        dtype = getattr(torch, config.model.dtype)
        made = bridge_bytes(model, dtype, tokens, trains_tower=trains_tower)
        back = f"gradients of {size(made.gradients)}" if trains_tower else "no gradients"
        return f"features of {size(made.features)} and {back}"

    tokens, key = _most_of_a_prompt(config, rules)
    prompts = config.groups_per_step
    return (
        f"messages of a chunk: {said(_TOKENS)} per {_TOKENS:,} tokens of {rules.noun}, of which it has "
        f"{tokens * prompts:,} at most ({prompts} prompts, by {key}): {said(tokens * prompts)}"
    )


def _most_of_a_prompt(config: RunConfig, rules: "MediaRules") -> tuple[int, str]:
    """Return the most tokens of media that a prompt may have, and the key that says so."""
    features_by_key = {
        key_in(name, MEDIA_LIMIT): rules.max_features(view.environment.max_media_bytes)
        for name, view in environment_views(config).items()
    }
    widest = max(features_by_key, key=features_by_key.__getitem__)
    # A prompt leaves room for a token of its response at least.
    bounds = [(features_by_key[widest], widest)]
    bounds += [(config.generator.max_model_len - 1, "generator.max_model_len")]
    return min(bounds)
