"""Where the tokens of pictures stand in a prompt, and at which positions."""

from typing import Any

import numpy as np
import pytest
import torch

from offbeat.messages.media import Media
from offbeat.models.media_placing import RowSpan, place_media
from offbeat.models.media_rules import MediaRules, media_rules
from offbeat.plugins.images.pictures import Pictures
from tests.support.image_text_models import PLACEHOLDER, make, patched, pictures, prompt_with
from tests.support.pictures import pixels

P = PLACEHOLDER
PROMPT = (1, 61, *[P] * 6, 62, 5, 61, *[P] * 2, 62, *[P] * 6, 7, 8)
"""Three pictures of 2 x 3, 1 x 2 and 3 x 2 tokens, two of them side by side but for a token."""


def rules_of(family: str) -> MediaRules:
    return media_rules(make(family).config)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_on_three_axes_are_those_of_transformers(family: str) -> None:
    model: Any = make(family)
    rules, media = rules_of(family), patched(0, (1, 4, 6), (1, 2, 4), (1, 6, 4))
    ids = torch.tensor([PROMPT])
    want, delta = model.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == P).int(),
        image_grid_thw=torch.from_numpy(Pictures.of(media).sizes).long(),
    )
    np.testing.assert_array_equal(rules.axes(PROMPT, media), want[:, 0].numpy())
    assert rules.shift(media) == delta.item() == -6
    text = rules.axes((1, 2, 3), None)
    np.testing.assert_array_equal(text, [[0, 1, 2]] * 3)
    assert rules.shift(None) == 0


def test_a_response_begins_where_the_positions_of_its_own_prompt_end() -> None:
    rules, media = rules_of("qwen2_5_vl"), [patched(0, (1, 4, 4)), None]
    prompts = [prompt_with(1, 5), (7, 8, 9)]
    length = len(prompts[0])
    spans = [RowSpan(0, 0, length + 3), RowSpan(1, length + 3, 2 * (length + 3))]
    positions_RT = np.tile(np.arange(length + 3), (2, 1))
    made = place_media(rules, prompts, media, spans, positions_RT)
    assert made is not None
    assert made.axes_3RT is not None
    np.testing.assert_array_equal(made.axes_3RT[:, 1], [np.arange(length + 3)] * 3)
    last = made.axes_3RT[:, 0, :length].max()
    np.testing.assert_array_equal(made.axes_3RT[:, 0, length:], [last + np.arange(1, 4)] * 3)
    np.testing.assert_array_equal(made.places_K, [2, 3, 4, 5])


def test_rows_of_one_prompt_share_the_features_of_its_pictures() -> None:
    rules = rules_of("idefics3")
    prompts, media = [prompt_with(1, 5), prompt_with(2, 6)], [pictures(0), pictures(1, 2)]
    spans = [RowSpan(1, 0, 20), RowSpan(0, 20, 40), RowSpan(1, 40, 60)]
    made = place_media(rules, prompts, media, spans, np.zeros((3, 20), np.int64))
    assert made is not None
    assert made.media == (media[1], media[0])
    np.testing.assert_array_equal(made.sources_K, [*range(8), *range(8, 12), *range(8)])
    np.testing.assert_array_equal(made.places_K[-8:], 40 + made.places_K[:8])


def test_placeholders_behind_those_of_the_pictures_are_sampled_tokens() -> None:
    rules, media = rules_of("idefics3"), pictures(0)
    history = (*prompt_with(1, 5), P, P, 9)
    np.testing.assert_array_equal(rules.places(history, media), [2, 3, 4, 5])
    assert rules.problem(history, media, is_history=True) == ""
    assert "has 6 placeholder tokens" in rules.problem(history, media, is_history=False)


@pytest.mark.parametrize(
    ("family", "media", "problem"),
    [
        ("idefics3", pixels((1, 32, 32)), "picture 0 of [1, 32, 32]"),
        ("idefics3", patched(0, (1, 4, 4)), "pictures as patches"),
        ("qwen2_5_vl", pixels((3, 32, 32)), "pictures as pixels"),
        ("qwen2_5_vl", patched(0, (1, 3, 4)), "sides of multiples of 2"),
        ("qwen2_5_vl", patched(0, (2, 4, 4)), "one frame"),
    ],
)
def test_pictures_that_a_model_does_not_read_are_named(
    family: str, media: Media, problem: str
) -> None:
    assert problem in rules_of(family).problem(prompt_with(1, 5), media, is_history=False)


@pytest.mark.parametrize("family", ["idefics3", "gemma3", "qwen2_5_vl"])
def test_pictures_of_so_many_bytes_have_no_more_features_than_their_rules_say(family: str) -> None:
    rules = rules_of(family)
    for count in (1, 2, 5):
        media = pictures(0, count, family)
        assert rules.max_features(Pictures.of(media).values.nbytes) == rules.count_features(media)
        assert rules.max_features(Pictures.of(media).values.nbytes - 1) < rules.count_features(
            media
        )
