"""Rotary frequencies on which vLLM and the trainer agree.

With ``rope_type`` longrope, both use the long factors if ``max_model_len`` exceeds the original
length. With dynamic, vLLM scales only by the config. The trainer agrees with it only if neither
scales at all.
"""

import json
from pathlib import Path
from typing import Any

from offbeat.plugins.vllm.errors import RopeDiffers


def check_rope(model_path: str | Path, max_model_len: int) -> None:
    """Refuse a model for which vLLM would use different rotary frequencies than the trainer.

    Raises:
        RopeDiffers: The frequencies differ.
    """
    settings: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_bytes())
    settings = settings.get("text_config") or settings
    rope: dict[str, Any] = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "dynamic":
        return
    bound = settings.get("max_position_embeddings", 0)
    original = rope.get("original_max_position_embeddings", bound)
    if max_model_len > bound or original != bound:
        raise RopeDiffers(max_model_len, bound, original)
