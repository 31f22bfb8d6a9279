"""The image-text model that comes with the repository, as its users rely on it."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from offbeat.plugins.images.digits import SIDE, picture

pytest.importorskip("PIL", reason="the extra vision is not installed")

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "models/tiny-digits"
MAKE_MODEL = runpy.run_path(str(ROOT / "examples/tiny_digits/make_model.py"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DIRECTORY, local_files_only=True)


def test_the_processor_makes_the_tokens_and_values_that_the_model_was_taught_with() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    processor: Any = AutoProcessor.from_pretrained(DIRECTORY, local_files_only=True)
    drawn = image.fromarray(picture(0, 0).pixels).convert("RGB")
    made = processor(text="<image>=", images=[drawn], return_tensors="np")
    taught = MAKE_MODEL["make_batch"](0, 1)
    ids = taught.token_ids_BT[0].tolist()
    assert made["input_ids"][0].tolist() == ids[:-2]
    assert processor.tokenizer.convert_ids_to_tokens(ids[:-2]) == MAKE_MODEL["PROMPT"]
    assert np.allclose(made["pixel_values"], taught.pixels_B.numpy(), atol=1e-6)


def test_a_sample_is_right_a_little_more_often_than_one_time_in_four(model: Any) -> None:
    held_out = MAKE_MODEL["make_batch"](0, MAKE_MODEL["HELD_OUT_ROWS"], seed=1)
    assert 0.25 <= MAKE_MODEL["sampled_accuracy"](model, held_out) <= 0.30


def test_the_script_makes_the_shape_that_is_shipped(model: Any) -> None:
    made, shipped = MAKE_MODEL["make_model"]().state_dict(), model.state_dict()
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }


def test_a_picture_is_a_function_of_its_seed_and_index() -> None:
    again, other = picture(3, 14), picture(3, 15)
    assert np.array_equal(picture(3, 14).pixels, again.pixels)
    assert not np.array_equal(again.pixels, other.pixels)
    assert again.pixels.shape == (SIDE, SIDE)


def test_every_digit_occurs_and_its_glyph_is_whole() -> None:
    whites = dict[int, set[int]]()
    for index in range(100):
        drawn = picture(0, index)
        whites.setdefault(drawn.digit, set()).add(int((drawn.pixels > 0).sum()))
    assert sorted(whites) == list(range(10))
    assert all(len(counts) == 1 for counts in whites.values())
