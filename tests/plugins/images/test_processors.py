"""What a worker sends is what the library's own processor makes of the same text and pictures."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from picture_models import write_gemma3, write_qwen
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from offbeat.environments.text import UnreadByTemplate, encode_prompt
from offbeat.messages.groups import Prompt
from offbeat.plugins.images.errors import (
    NoPictures,
    StrayPlaceholder,
    WrongPlaces,
)
from offbeat.plugins.images.pictures import MediaKind, Pictures
from offbeat.plugins.images.processors import PictureProcessor, load_processor
from offbeat.plugins.images.thumbnails import thumbnails

TINY_DIGITS = "models/tiny-digits"


def loaded(path: Path | str) -> PictureProcessor:
    return load_processor(str(path), trust_remote_code=False)


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


PICTURES = [noise(40, 60), noise(90, 30)]


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def same(processor: PictureProcessor, whole: Any, place: str, kind: MediaKind) -> None:
    """Encode two pictures both ways, and compare."""
    encoded = processor.encode("1 <image> and <image> = 2", PICTURES)
    theirs = whole(
        text=[f"1 {place} and {place} = 2"], images=[PICTURES], return_tensors="np", padding=False
    )
    assert encoded.token_ids == tuple(theirs["input_ids"][0].tolist())
    assert encoded.media is not None
    assert Pictures.of(encoded.media).kind is kind
    np.testing.assert_array_equal(
        Pictures.of(encoded.media).values, theirs["pixel_values"].reshape(-1)
    )
    Pictures.of(encoded.media)  # checks them
    if kind is MediaKind.PATCHES:
        np.testing.assert_array_equal(Pictures.of(encoded.media).sizes, theirs["image_grid_thw"])
    else:
        shape = theirs["pixel_values"].shape[-3:]
        assert Pictures.of(encoded.media).sizes.tolist() == [list(shape)] * 2


def test_idefics3_is_encoded_as_the_library_does_it() -> None:
    same(
        loaded(TINY_DIGITS), AutoProcessor.from_pretrained(TINY_DIGITS), "<image>", MediaKind.PIXELS
    )


def test_gemma3_is_encoded_as_the_library_does_it(tmp_path: Path) -> None:
    whole = write_gemma3(tmp_path)
    same(loaded(tmp_path), whole, "<start_of_image>", MediaKind.PIXELS)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_is_encoded_as_the_library_does_it_without_its_processor_of_videos(
    tmp_path: Path, family: str
) -> None:
    whole = write_qwen(tmp_path, family)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    same(loaded(tmp_path), whole, place, MediaKind.PATCHES)


def test_a_person_sees_the_picture_of_a_qwen_as_it_was(tmp_path: Path) -> None:
    write_qwen(tmp_path, "qwen2_5_vl")
    picture = noise(64, 32)  # of a size that is not changed
    (seen,) = thumbnails(loaded(tmp_path).encode("<image>", [picture]).media)
    pixels = np.frombuffer(seen.rgb, np.uint8).reshape(32, 64, 3).astype(int)
    # Each channel has a deviation of its own, and contrast is stretched over all of them.
    correlation = np.corrcoef(pixels.reshape(-1), np.asarray(picture).reshape(-1))[0, 1]
    assert correlation > 0.99


def test_a_picture_that_is_cut_into_tiles_has_a_size_for_each(tmp_path: Path) -> None:
    whole = AutoProcessor.from_pretrained(TINY_DIGITS)
    whole.image_processor.do_image_splitting = True
    whole.image_processor.size = {"longest_edge": 64}
    whole.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "idefics3"}')
    encoded = loaded(tmp_path).encode("<image>=", [noise(64, 64)])
    assert encoded.media is not None
    assert (
        Pictures.of(encoded.media).sizes.tolist() == [[3, 32, 32]] * 5
    )  # four tiles and the whole


def test_messages_are_rendered_by_the_chat_template_of_the_model() -> None:
    processor = loaded(TINY_DIGITS)
    parts = [{"type": "image"}, {"type": "text", "text": "="}]
    in_parts = processor.encode(chat({"role": "user", "content": parts}), PICTURES[:1])
    in_text = processor.encode(chat({"role": "user", "content": "<image>="}), PICTURES[:1])
    assert in_parts.token_ids == in_text.token_ids
    assert set(processor.encode("<image>=", PICTURES[:1]).token_ids) <= set(in_text.token_ids)


def test_a_text_beside_parts_reaches_a_template_that_reads_parts_alone(tmp_path: Path) -> None:
    shutil.copytree(TINY_DIGITS, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}"  # SmolVLM's loop
        "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}"
        "{{ part['text'] }}{% endif %}{% endfor %};{% endfor %}"
    )
    processor = loaded(tmp_path / "model")
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "="}]}
    texts = ["12", [{"type": "text", "text": "12"}]]
    plain, parts = (
        processor.encode(chat({"role": "system", "content": text}, asked), PICTURES[:1])
        for text in texts
    )
    assert plain.token_ids == parts.token_ids
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    row = {"messages": [{"role": "user", "content": "12"}]}
    ids = encode_prompt(Prompt(0, 0, 0, row), tokenizer)
    assert tokenizer.decode(ids).replace(" ", "") == "12;"


def test_a_field_of_a_text_that_is_null_makes_no_place(tmp_path: Path) -> None:
    shutil.copytree(TINY_DIGITS, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] %}"  # Qwen's question
        "{% if part['type'] == 'image' or 'image' in part %}<image>{% elif 'text' in part %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    nulls = [{"type": "image", "text": None}, {"type": "text", "text": "=", "image": None}]
    encoded = loaded(tmp_path / "model").encode(
        chat({"role": "user", "content": nulls}), PICTURES[:1]
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(encoded.token_ids).replace(" ", "").endswith("=")
    row = {"messages": [{"role": "user", "content": nulls[1:]}]}
    assert tokenizer.decode(encode_prompt(Prompt(0, 0, 0, row), tokenizer)) == "="


@pytest.mark.parametrize(("text", "places"), [("=", 0), ("<image><image>=", 2)])
def test_a_text_has_one_place_for_each_picture(text: str, places: int) -> None:
    with pytest.raises(WrongPlaces, match=f"has {places} places for its 1 pictures"):
        loaded(TINY_DIGITS).encode(text, PICTURES[:1])


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_token_of_a_picture_beside_one_is_refused_by_name(tmp_path: Path, token: str) -> None:
    write_qwen(tmp_path, "qwen2_5_vl")
    with pytest.raises(StrayPlaceholder, match=re.escape(token)):
        loaded(tmp_path).encode(f"what is {token} in <image>", PICTURES[:1])


def test_a_soft_token_before_a_picture_of_gemma3_would_take_its_first_feature(
    tmp_path: Path,
) -> None:
    write_gemma3(tmp_path)
    with pytest.raises(StrayPlaceholder, match="<image_soft_token>"):
        loaded(tmp_path).encode("<image_soft_token> is <image>", PICTURES[:1])


def test_a_model_that_reads_no_pictures_is_named_with_those_that_do() -> None:
    with pytest.raises(NoPictures, match=r"models of idefics3, gemma3, .*, but this is a "):
        loaded("models/tiny-addition")


def test_smolvlm2_whose_processor_needs_packages_for_videos_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm"}')
    with pytest.raises(NoPictures, match=r"models of idefics3, .*, but this is a smolvlm"):
        loaded(tmp_path)


def test_a_model_without_a_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "idefics3"}')
    with pytest.raises(NoPictures, match="its image processor cannot be loaded"):
        loaded(tmp_path)
    with pytest.raises(NoPictures, match=r"its config\.json cannot be read"):
        loaded(tmp_path / "nowhere")


def test_the_model_goes_on_with_a_last_message_of_the_assistant_about_a_picture() -> None:
    processor = loaded(TINY_DIGITS)
    asked = {"role": "user", "content": "<image>="}
    begun = processor.encode(chat(asked, {"role": "assistant", "content": "4"}), PICTURES[:1])
    assert begun.token_ids == (
        *processor.encode(chat(asked), PICTURES[:1]).token_ids,
        *processor.tokenizer.encode("4", add_special_tokens=False),
    )
    with pytest.raises(UnreadByTemplate, match="does not read tools"):
        processor.encode(chat(asked, tools=[{"type": "function"}]), PICTURES[:1])
