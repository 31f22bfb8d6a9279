"""Choice of transformers' class by which a model is made from its config."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def auto_class_of(config: PreTrainedConfig) -> Any:  # noqa: ANN401 -- two classes without a common base that has their methods
    """Return the auto class of a config: that of image-text models if it has a vision tower."""
    is_image_text = "vision_config" in config.sub_configs
    if is_image_text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
