"""The built-in task with pictures: a digit that is drawn from the seed and the row."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image

from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.protocol import EncodedPrompt
from offbeat.messages.groups import Prompt
from offbeat.messages.media import media_bytes
from offbeat.plugins.images.digits import DigitPrompts, drawn, picture
from offbeat.plugins.images.encoder import PictureEncoder
from offbeat.plugins.images.errors import BadPicture
from offbeat.plugins.images.pictures import Pictures
from offbeat.plugins.images.processors import load_processor
from offbeat.plugins.images.section import ImagesConfig
from tests.support.recipes import make_config

FILE_PROMPT = {"prompt": "<image>=", "image": "a.png"}


def prompts(first: int = 0) -> DigitPrompts:
    return DigitPrompts(50, seed=3, first=first, shuffle=False, epochs=1)


def encoder(**limits: float) -> PictureEncoder:
    images = ImagesConfig.model_validate(limits)
    return PictureEncoder(images, load_processor("models/tiny-digits", trust_remote_code=False))


def encoded(prompt: Prompt | None, **limits: float) -> EncodedPrompt:
    assert prompt is not None
    made = asyncio.run(encoder(**limits).encode(prompt))
    assert made is not None
    return made


def test_a_prompt_is_a_picture_and_its_digit_and_always_the_same() -> None:
    for index in range(5):
        prompt = prompts().prompt(index)
        assert prompt is not None
        assert prompt.data["answer"] == picture(3, index).digit
        assert np.asarray(drawn(prompt.data["image"]))[..., 0].tolist() == (
            picture(3, index).pixels.tolist()
        )
        assert prompt == prompts().prompt(index)


def test_a_digit_is_encoded_by_the_models_processor() -> None:
    one, other = (encoded(prompts().prompt(index)) for index in (0, 1))
    assert one.token_ids == other.token_ids
    assert one.media is not None
    assert other.media is not None
    assert Pictures.of(one.media).sizes.tolist() == [[3, 32, 32]]
    assert (Pictures.of(one.media).values != Pictures.of(other.media).values).any()
    assert media_bytes(one.media) == 4 * 3 * 32 * 32 + 16


def test_evaluations_read_other_pictures_than_training() -> None:
    run = config()
    trained, held_out = make_prompts(run), make_evaluation_sets(run)[""]
    seen = {str(each.data["image"]) for i in range(50) if (each := trained.prompt(i))}
    read = {str(each.data["image"]) for i in range(50) if (each := held_out.prompt(i))}
    assert (len(seen), len(read)) == (50, 50)
    assert not seen & read


def config() -> RunConfig:
    digits = {"name": "digits", "images": {}, "options": {"rows": 50}}
    return make_config("models/tiny-digits", environment=digits, eval={"interval": 5})


def test_a_file_is_encoded_from_its_bytes(tmp_path: Path) -> None:
    Image.fromarray(picture(3, 0).pixels).save(tmp_path / "a.png")
    in_file = encoded(Prompt(0, 0, 0, FILE_PROMPT, folder=str(tmp_path)))
    as_drawn = encoded(prompts().prompt(0))
    assert in_file.media is not None
    assert as_drawn.media is not None
    assert in_file.token_ids == as_drawn.token_ids
    np.testing.assert_array_equal(
        Pictures.of(in_file.media).values, Pictures.of(as_drawn.media).values
    )


def test_limits_hold_for_the_prompt_as_a_whole(tmp_path: Path) -> None:
    Image.fromarray(picture(3, 0).pixels).save(tmp_path / "a.png")
    several = {"prompt": "<image><image>=", "images": ["a.png", "a.png"]}
    prompt = Prompt(0, 0, 7, several, folder=str(tmp_path))
    with pytest.raises(BadPicture, match=r"is one of 2; environment.images.max_pictures is 1"):
        encoded(prompt)
    with pytest.raises(BadPicture, match=r"a.png' needs 0.02346 MiB .*max_mib is 0.02"):
        encoded(prompt, max_pictures=2, max_mib=0.02)
    with pytest.raises(BadPicture, match=r"which is 1024; environment.images.max_pixels is 1000"):
        encoded(prompt, max_pictures=2, max_pixels=1000)
    with pytest.raises(BadPicture, match="at most 10 are read"):
        encoded(prompt, max_pictures=2, max_file_mib=1e-5)


def test_a_prompt_without_pictures_is_left_to_its_environment() -> None:
    assert asyncio.run(encoder().encode(Prompt(0, 0, 0, {"prompt": "1+1="}))) is None


@pytest.mark.parametrize("named", [{}, {"seed": -1, "index": 0}, {"seed": 0, "index": "0"}])
def test_what_names_no_drawn_picture_is_refused(named: object) -> None:
    with pytest.raises(BadPicture, match="give its seed and index"):
        drawn(named)
