import re
from pathlib import Path

import pytest

from offbeat.config.reference import document, is_repeated
from offbeat.config.schema import known_keys

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


@pytest.mark.plugins
def test_the_configuration_page_is_what_the_models_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "docs/configuration.md is out of date; run: python -m offbeat.config.reference"
    )


def test_every_key_has_one_entry_unless_its_section_repeats_another() -> None:
    entries = re.findall(r"^- `([\w.]+)` \(", document(), re.MULTILINE)
    keys = [key.key for key in known_keys().values() if not key.sections]
    assert sorted(entries) == sorted(key for key in keys if not is_repeated(key))
    assert is_repeated("environments.NAME.data.path")
    assert not is_repeated("data.path")


def test_a_section_that_repeats_another_refers_to_it() -> None:
    assert "It has the keys of [`environment`](#environment)." in document()


def test_no_line_begins_with_the_minus_of_a_formula_which_would_start_a_list() -> None:
    assert re.findall(r"^ *-(?! `).*", document(), re.MULTILINE) == []
