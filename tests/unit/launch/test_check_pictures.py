"""``offbeat check`` encodes the first prompts with their pictures, as a worker will."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image

from offbeat.config.run import RunConfig
from offbeat.environments.digit_pictures import picture
from offbeat.launch.checks.finding import Finding
from offbeat.launch.checks.pictures import check_pictures


def findings(model: str = "models/tiny-digits", **sections: Any) -> list[Finding]:
    values = {"steps": 1, "model": {"path": model}, "generator": {"max_model_len": 16}}
    return list(check_pictures(RunConfig.model_validate(values | sections)))


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
    (found,) = findings(environment={"name": "digits", "images": {"max_mib": 0.02}})
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
            "warning",
            "row 0 of data.path: picture 'b.png'",
        ),
        ({"prompt": "=", "image": "a.png"}, "warning", "has 0 places for its 1 pictures"),
        (
            {"prompt": "<image>" * 3 + "=", "images": ["a.png"] * 3},
            "error",
            "has 22 tokens with its pictures, which leaves no room",
        ),
    ],
)
def test_rows_of_a_file_are_encoded_with_the_pictures_beside_it(
    tmp_path: Path, row: dict[str, Any], level: str, told: str
) -> None:
    (found,) = findings(**of_file(tmp_path, row))
    assert str(found).startswith(level)
    assert told in str(found)


def test_a_model_that_reads_text_alone_is_an_error() -> None:
    (found,) = findings("models/tiny-addition", environment={"name": "digits", "images": {}})
    assert str(found).startswith("error")
    assert "pictures are read by models of idefics3" in str(found)


def test_a_run_without_pictures_is_not_checked_for_them() -> None:
    assert findings() == []
