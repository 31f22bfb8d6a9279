"""Checks that the model reads pictures."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs untyped.

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from offbeat.config.mixture import has_media
from offbeat.config.run import RunConfig
from offbeat.images.families import READ_FAMILIES, rules_of_config
from offbeat.launch.checks.finding import Finding, error, ok

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUBJECT: Final = "vision tower"


def check_model(config: RunConfig, model: "PreTrainedModel") -> Iterator[Finding]:
    """Check that a model without memory reads the pictures of the prompts."""
    if not has_media(config):
        return
    kind: str = model.config.model_type
    if (rules := rules_of_config(model.config)) is None:
        seen = f"{type(model).__name__} ({kind}): its pictures are not supported"
        families: Sequence[str] = READ_FAMILIES
        if config.trainer.backend == "megatron":
            from offbeat.trainers.megatron.image_text import IMAGE_TEXT_FAMILIES  # noqa: PLC0415 -- loads torch

            families = [each for each in families if each in IMAGE_TEXT_FAMILIES]
        yield error(_SUBJECT, seen, f"Take a model of {', '.join(families)}.")
    else:
        proof = "proved at the start"
        if config.trainer.backend == "megatron":
            proof = "compared with the engine's by canaries (sync.canary_interval)"
        yield ok(_SUBJECT, f"{type(model).__name__} reads {rules.kind.value}; {proof}")
