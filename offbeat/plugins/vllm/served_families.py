"""Families of image-text models that vLLM serves here. Depends on the option ``images``."""

import json
from pathlib import Path
from typing import Any, Final

from offbeat.plugins.images.families import FAMILIES
from offbeat.plugins.vllm.errors import PicturesUnserved

SERVED: Final = ("idefics3",)
"""Values of ``model_type`` for which vLLM was compared with transformers on pictures."""


def check_family(model_path: str | Path) -> None:
    """Refuse an image-text model if vLLM could not compute the pictures of its canary.

    Raises:
        PicturesUnserved: The model's family is not in ``SERVED``.
    """
    settings: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_bytes())
    family = settings.get("model_type", "")
    if family in FAMILIES and family not in SERVED:
        raise PicturesUnserved(family, SERVED)
