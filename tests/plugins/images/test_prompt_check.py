"""``offbeat check`` encodes the first prompts with their pictures, as a worker will."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image

from offbeat.launch.checks.prompt_lengths import check_prompt_lengths
from offbeat.messages.finding import Finding
from offbeat.plugins.images.digits import picture
from offbeat.plugins.images.prompt_check import check_pictures
from tests.support.recipes import make_config


def findings(model: str = "models/tiny-digits", **sections: Any) -> list[Finding]:
    config = make_config(model, **{"generator": {"max_model_len": 16}, **sections})
    return list(check_pictures(config))


def of_file(folder: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    """A file of rows; a picture lies beside it."""
    Image.fromarray(picture(0, 0).pixels).save(folder / "a.png")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = {"name": "function", "target": "a:b", "images": {"max_pictures": 8}}
    return {
        "environment": environment,
        "data": {"path": str(folder / "rows.jsonl"), "shuffle": False},
    }


def test_drawn_digits_are_encoded_and_measured() -> None:
    fits, found = findings(environment={"name": "digits", "images": {"max_mib": 0.02}})
    assert str(fits).startswith("ok")
    assert "tokens with a picture: 7 of 640 x 480" in str(fits)
    assert str(found).startswith("ok")
    told = "data.path encoded with their pictures: 64; 8 tokens and 0.0117 MiB at most"
    assert told in str(found)


@pytest.mark.parametrize(
    ("row", "level", "told"),
    [
        (
            {"prompt": "<image>=", "image": "a.png"},
            "ok",
            "encoded with their pictures: 1; 8 tokens",
        ),
        (
            {"prompt": "<image>=", "image": "b.png"},
            "error",  # it is the only row
            "1 rows of data.path cannot be used: 1 BadPicture (row 0: picture 'b.png'",
        ),
        ({"prompt": "=", "image": "a.png"}, "error", "has 0 places for its 1 pictures"),
        (
            {"prompt": "<image>" * 3 + "=", "images": ["a.png"] * 3},
            "error",
            "22 tokens with its pictures leave no room",
        ),
    ],
)
def test_rows_of_a_file_are_encoded_with_the_pictures_beside_it(
    tmp_path: Path, row: dict[str, Any], level: str, told: str
) -> None:
    _, found = findings(**of_file(tmp_path, row))
    assert str(found).startswith(level)
    assert told in str(found)


def test_a_row_at_which_the_chat_template_raises_is_a_finding(tmp_path: Path) -> None:
    shutil.copytree("models/tiny-digits", tmp_path / "model")
    template = "{{ raise_exception('no users here') }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    row = {"messages": [{"role": "user", "content": "<image>="}], "image": "a.png"}
    _, found = findings(str(tmp_path / "model"), **of_file(tmp_path, row))
    assert "1 TemplateError (row 0: raised by the model's processor: no users here)" in str(found)


def test_rows_of_text_beside_rows_with_pictures_are_tokenised(tmp_path: Path) -> None:
    picture = {"prompt": "<image>=", "image": "a.png"}
    sections = of_file(tmp_path, picture, {"prompt": "1+1=", "images": []})
    model = {"path": "models/tiny-digits"}
    config = make_config(model, **sections)
    (found,) = check_prompt_lengths(config)
    assert "the 1 longest of 2 rows in data.path were tokenised: 4 tokens" in str(found)


def test_a_row_of_text_that_spells_a_token_of_pictures_is_named(tmp_path: Path) -> None:
    sections = of_file(tmp_path, {"prompt": "1+1="}, {"prompt": "<image>="})
    sections["environment"]["images"] = None
    model = {"path": "models/tiny-digits"}
    config = make_config(model, **sections)
    lengths, found = check_prompt_lengths(config)
    assert str(lengths).startswith("ok")
    assert str(found).startswith("error")  # the one step of the run draws it
    assert "the first is row 1: it has the token '<image>' (5) at position 0" in str(found)


def test_a_model_that_reads_text_alone_is_an_error() -> None:
    (found,) = findings("models/tiny-addition", environment={"name": "digits", "images": {}})
    assert str(found).startswith("error")
    assert "pictures are read by models of idefics3" in str(found)


def test_a_run_without_pictures_is_not_checked_for_them() -> None:
    assert findings() == []
