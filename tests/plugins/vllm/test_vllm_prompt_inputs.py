"""What vLLM gets of a prompt: the ids as they are, values by picture, names with the salt."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from offbeat.messages.media import Media
from offbeat.plugins.images.families import PixelRules
from offbeat.plugins.images.pictures import MediaKind, Pictures
from offbeat.plugins.vllm.engine import PromptInputs

RULES = PixelRules(placeholder=9, size=(3, 4, 4), tokens=2)
PROMPT = (1, 9, 9, 2, 9, 9, 3, 9)  # the last was sampled


class Items:
    """Keeps what it is made of."""

    @staticmethod
    def from_hf_inputs(values: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return values, fields


def field(modality: str, *how: Any, **options: Any) -> tuple[str, Any]:
    del options
    return modality, [each.tolist() for each in how]


LIBRARY: Any = SimpleNamespace(
    TokensPrompt=dict,
    mm_input=lambda ids, values, names, ranges, cache_salt: SimpleNamespace(
        ids=ids, values=values, names=names, ranges=ranges, salt=cache_salt
    ),
    MultiModalKwargsItems=Items,
    MultiModalFieldConfig=SimpleNamespace(flat_from_sizes=field, batched=field),
    PlaceholderRange=lambda start, length, taken: (start, length, taken.tolist()),
)


def pictures(*seeds: int) -> Media:
    values = [np.random.default_rng(seed).standard_normal(48, np.float32) for seed in seeds]
    return Pictures(
        MediaKind.PIXELS, np.concatenate(values), np.array([RULES.size] * len(seeds), np.int32)
    ).media


def made(media: Media | None, ids: Sequence[int] = PROMPT, salt: str = "1.1") -> Any:
    return PromptInputs(LIBRARY, RULES).of(ids, media, salt)


def test_a_prompt_of_text_is_its_ids_and_the_salt() -> None:
    assert made(None) == {"prompt_token_ids": list(PROMPT), "cache_salt": "1.1"}


def test_ids_are_those_of_the_request_and_each_picture_has_its_own_values_and_places() -> None:
    media = pictures(1, 2)
    prompt = made(media)
    assert (prompt.ids, prompt.salt) == (list(PROMPT), "1.1")
    assert prompt.ranges == {"image": [(1, 2, [True, True]), (4, 2, [True, True])]}
    values, fields = prompt.values
    assert torch.equal(values["pixel_values"].flatten(), torch.tensor(Pictures.of(media).values))
    assert values["pixel_values"].shape == (2, 3, 4, 4)
    assert values["pixel_attention_mask"].all()
    assert fields["pixel_values"] == ("image", [[1, 1]])


def test_a_gap_among_the_placeholders_of_a_picture_keeps_its_tokens() -> None:
    assert made(pictures(1), (9, 5, 9)).ranges == {"image": [(0, 3, [True, False, True])]}


def test_equal_pictures_share_a_name_and_others_or_another_salt_have_another() -> None:
    one, same, other = made(pictures(1, 1, 2), (9,) * 6).names["image"]
    (later,) = made(pictures(1), salt="2.3").names["image"]
    assert one == same
    assert len({one, other, later}) == 3
