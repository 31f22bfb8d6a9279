from pathlib import Path

from offbeat.config.reference import document
from offbeat.config.schema import known_keys

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_configuration_page_is_what_the_models_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "docs/configuration.md is out of date; run: python -m offbeat.config.reference"
    )


def test_every_key_has_one_row() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `")]
    named = [row.split("`")[1] for row in rows]
    assert sorted(named) == sorted(key.key for key in known_keys().values() if not key.sections)


def test_every_row_has_four_cells() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `")]
    assert {row.count(" | ") for row in rows} == {3}
