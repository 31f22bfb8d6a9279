"""Finds the tokens of a model that represent pictures, in its config and its tokenizer."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import json
from pathlib import Path
from typing import Any, Final

from offbeat.models.media_rules import TEXT_ALONE, MediaTokens, media_rules
from offbeat.plugins.images.errors import STRAY_TOKEN, UNUSABLE

_ATTRIBUTES: Final = ("image_token_id", "boi_token_index", "video_token_id")
"""Attributes of image-text model configs that name a picture token."""


def picture_tokens(
    path: str,
    tokenizer: Any,  # noqa: ANN401 - of transformers
    *,
    trust_remote_code: bool,
) -> MediaTokens:
    """Return the picture tokens of the model at ``path``.

    Return ``TEXT_ALONE`` if its config has no vision tower.

    Raises:
        OSError: The config cannot be read.
        ValueError: transformers does not support its model type.
    """
    file = Path(path) / "config.json"
    if not file.is_file() or "vision_config" not in json.loads(file.read_bytes()):
        return TEXT_ALONE
    from transformers import AutoConfig  # noqa: PLC0415 - needs seconds, only for a vision tower

    config = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=trust_remote_code
    )
    named = [getattr(config, name, None) for name in _ATTRIBUTES]
    ids = [each for each in named if isinstance(each, int)]
    # A token that the tokenizer does not have cannot result from a text.
    known = zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)
    names = {id_: str(name) for id_, name in known if name}
    return MediaTokens(names, media_rules(config), STRAY_TOKEN, UNUSABLE)
