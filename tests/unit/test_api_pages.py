"""The pages of the Python API, of plug-in protocols and of the command line follow from the sources."""

import ast
import re
from pathlib import Path

import pytest

import offbeat
import offbeat.interfaces
import offbeat.testing
from tools.api_pages import COMMAND, NOT_EXPORTED, PAGES, Page, compose_page
from tools.command_page import PAGE as COMMAND_LINE
from tools.command_page import compose

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_a_page_of_public_names_is_what_the_sources_say(page: Page) -> None:
    written = (ROOT / page.file).read_text(encoding="utf-8")
    assert written == compose_page(page), f"{page.file} is out of date; run: {COMMAND}"


def test_every_public_name_is_on_one_page() -> None:
    shown = [name for page in PAGES for names in page.chapters.values() for name in names]
    public = {*offbeat.__all__, *offbeat.interfaces.__all__, *offbeat.testing.__all__}
    assert sorted(shown) == sorted(public | NOT_EXPORTED.keys())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.file)
def test_every_signature_on_a_page_is_valid_python(page: Page) -> None:
    blocks = BLOCK.findall(compose_page(page))
    assert len(blocks) > 30
    for block in blocks:
        ast.parse(block)


def test_a_public_function_lists_its_arguments_and_errors() -> None:
    train = compose_page(PAGES[0]).split("### `train`")[1].split("### `start`")[0]
    assert "- `reward`: `reward(row, response) -> float`" in train
    assert "- `TrainingFailed`: The run ended with an error." in train


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    written = COMMAND_LINE.read_text(encoding="utf-8")
    assert written == compose(), "out of date; run: python -m tools.command_page"


def test_the_page_of_the_command_line_has_options_with_their_defaults() -> None:
    page = compose()
    assert "\n## `offbeat why`\n" in page
    assert "* `--samples <int range>`: Samples per prompt.  [default: 4; x>=1]" in page
