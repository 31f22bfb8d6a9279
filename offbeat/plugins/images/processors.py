"""Image processors of model families: the library's own code, wrapped in one call.

Each family defines how to load its processor without torchvision, and the layout of its values.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportMissingTypeStubs=false
# transformers leaves its processors untyped.

import abc
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

from offbeat.environments.protocol import EncodedPrompt
from offbeat.environments.text import render_prompt
from offbeat.messages.media import Media
from offbeat.plugins.images.errors import (
    PLACE,
    BadPicture,
    NoPictures,
    StrayPlaceholder,
    WrongPlaces,
)
from offbeat.plugins.images.pictures import MediaKind, Pictures


class PictureProcessor(abc.ABC):
    """Computes prompt ids and values from a text and its pictures, like the model's processor."""

    place: str
    """Text that marks a picture's place in a prompt, before it is expanded."""

    _placeholders: Sequence[str] = ()
    """Tokens that a text must not have outside these places."""

    def __init__(self, tokenizer: Any, template: Any) -> None:  # noqa: ANN401 - of transformers
        self.tokenizer, self._template = tokenizer, template

    def encode(
        self, prompt: str | Mapping[str, Any], pictures: Sequence[Image.Image]
    ) -> EncodedPrompt:
        """Encode a text, or a row with messages for the chat template, with its pictures.

        Raises:
            WrongPlaces: The text does not have one place for each picture.
            StrayPlaceholder: The text has a picture token outside these places.
        """
        if isinstance(prompt, str):
            text = prompt
        else:
            text = render_prompt(prompt, self._template, tokenize=False)
        text = text.replace(PLACE, self.place)
        if (places := text.count(self.place)) != len(pictures):
            raise WrongPlaces(places, len(pictures))
        outside = text.replace(self.place, " ")
        if stray := [token for token in self._placeholders if token in outside]:
            raise StrayPlaceholder(stray[0])
        ids, media = self._process(text, list(pictures), add_specials=isinstance(prompt, str))
        return EncodedPrompt(tuple(ids), media)

    @abc.abstractmethod
    def _process(
        self, text: str, pictures: list[Image.Image], *, add_specials: bool
    ) -> tuple[list[int], Media]: ...


class _Pixels(PictureProcessor):
    """Processor of Idefics3, SmolVLM's first release and Gemma 3: the library's whole processor."""

    def __init__(
        self,
        processor: Any,  # noqa: ANN401 - of transformers
        place: str,
        *placeholders: str,
    ) -> None:
        super().__init__(processor.tokenizer, processor)
        self._processor, self.place = processor, place
        self._placeholders = placeholders

    def _process(
        self, text: str, pictures: list[Image.Image], *, add_specials: bool
    ) -> tuple[list[int], Media]:
        made = self._processor(
            text=[text], images=[pictures], add_special_tokens=add_specials, return_tensors="np"
        )
        values = np.asarray(made["pixel_values"], np.float32)
        shape = values.shape[-3:]
        mask = made.get("pixel_attention_mask")
        if mask is not None and not np.asarray(mask).all():
            problem = "is padded to the size of another: the processor has to resize or cut them"
            raise BadPicture("of the prompt", problem)
        sizes = np.tile(np.array(shape, np.int32), (values.size // int(np.prod(shape)), 1))
        return made["input_ids"][0].tolist(), Pictures(
            MediaKind.PIXELS, values.reshape(-1), sizes
        ).media


class _Patches(PictureProcessor):
    """Processor of Qwen2-VL and its successors: image processor and tokenizer, without videos.

    The library's whole processor needs torchvision for videos. In a text with pictures it only
    repeats each picture's token, once per merged cell of its grid.
    """

    place = "<|vision_start|><|image_pad|><|vision_end|>"
    _pad = "<|image_pad|>"
    _placeholders = (_pad, "<|video_pad|>")

    def __init__(self, images: Any, tokenizer: Any) -> None:  # noqa: ANN401 - of transformers
        super().__init__(tokenizer, tokenizer)
        self._images = images

    def _process(
        self, text: str, pictures: list[Image.Image], *, add_specials: bool
    ) -> tuple[list[int], Media]:
        made = self._images(images=pictures, return_tensors="np")
        grids = np.asarray(made["image_grid_thw"], np.int32)
        cells = grids.prod(axis=1) // self._images.merge_size**2
        head, *rest = text.split(self._pad)
        expanded = zip(cells.tolist(), rest, strict=True)
        text = head + "".join(self._pad * count + after for count, after in expanded)
        ids = self.tokenizer(text, add_special_tokens=add_specials)["input_ids"]
        values = np.asarray(made["pixel_values"], np.float32).reshape(-1)
        return ids, Pictures(MediaKind.PATCHES, values, grids).media


_PIXELS: Final = {
    "idefics3": (PLACE,),
    "gemma3": ("<start_of_image>", "<image_soft_token>"),
}
"""Text that marks the place of a picture, then the token that replaces it, if different."""

_PATCHES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def load_processor(path: str, *, trust_remote_code: bool) -> PictureProcessor:
    """Load the processor of the model at ``path``.

    Raises:
        NoPictures: The model reads no pictures, its family is not supported here, or the files of
            its processor are damaged.
    """
    try:
        kind = json.loads((Path(path) / "config.json").read_text("utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise NoPictures(path, f"its config.json cannot be read: {error}") from error
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        if kind in _PIXELS:
            return _Pixels(AutoProcessor.from_pretrained(path, **local), *_PIXELS[kind])
        if kind in _PATCHES:
            images = AutoImageProcessor.from_pretrained(path, **local)
            return _Patches(images, AutoTokenizer.from_pretrained(path, **local))
    except Exception as error:
        # Its files may contain anything, and the library checks little of it.
        problem = f"its image processor cannot be loaded: {type(error).__name__}: {error}"
        raise NoPictures(path, problem) from error
    known = ", ".join([*_PIXELS, *_PATCHES])
    raise NoPictures(path, f"pictures are read by models of {known}, but this is a {kind}")
