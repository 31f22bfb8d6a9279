"""Tokens that stand for pictures, by the config and the tokenizer of a model."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from offbeat.models.media_rules import TEXT_ALONE, MediaTokens
from offbeat.plugins.images.model_tokens import picture_tokens
from tests.support.image_text_models import PLACEHOLDER, make, pictures, prompt_with


class NamesTokens:
    """A tokenizer of so many tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [f"<{each}>" if each < self.size else None for each in ids]


def of(path: Path | str, tokenizer: Any) -> MediaTokens:
    return picture_tokens(str(path), tokenizer, trust_remote_code=False)


@pytest.mark.parametrize(
    ("family", "size", "ids"),
    [
        ("idefics3", 64, [PLACEHOLDER]),
        ("qwen2_5_vl", 64, [PLACEHOLDER, 63]),  # and that of videos
        ("qwen3_vl", 64, [PLACEHOLDER, 63]),
        ("gemma3", 64, [PLACEHOLDER]),
        ("gemma3", 1 << 20, [PLACEHOLDER, 255_999]),  # and what opens a picture
    ],
)
def test_each_family_has_tokens_that_no_text_may_hold(
    tmp_path: Path, family: str, size: int, ids: list[int]
) -> None:
    make(family).config.save_pretrained(tmp_path)
    tokens = of(tmp_path, NamesTokens(size))
    assert sorted(tokens.name_by_id) == sorted(ids)
    assert tokens.problem_of_text([1, 2, 3]) == ""
    for each in ids:
        told = f"has the token '<{each}>' ({each}) at position 1 without pictures"
        assert tokens.problem_of_text([7, each, each]).startswith(told)


def test_a_prompt_has_the_placeholders_of_its_pictures_and_no_more() -> None:
    tiny = "models/tiny-digits"
    tokens = of(tiny, AutoTokenizer.from_pretrained(tiny))
    (token,) = tokens.name_by_id
    media, ids = pictures(0), [token if i == PLACEHOLDER else i for i in prompt_with(1, 7)]
    assert tokens.problem_of_prompt(ids, media) == ""
    assert "has 5 placeholder tokens" in tokens.problem_of_prompt([token, *ids], media)
    assert "'<image>'" in tokens.problem_of_prompt(ids, None)


def test_a_model_without_a_tower_and_a_folder_without_a_config_have_none(tmp_path: Path) -> None:
    assert of("models/tiny-addition", NamesTokens(9)) is TEXT_ALONE
    assert of(tmp_path, NamesTokens(9)) is TEXT_ALONE
    assert TEXT_ALONE.problem_of_text([5]) == ""
    assert TEXT_ALONE.problem_of_prompt([5], pictures(0)) == ""
