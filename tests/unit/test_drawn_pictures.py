"""The drawn pictures of the pages: readable in both colour schemes, shown somewhere, and true."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from offbeat.controller.group_moves import MOVES

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs/images").glob("*.svg"))
MAX_WIDTH_PX, MIN_FONT_PX = 800, 12

svg = pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)


def words_of(picture: Path) -> str:
    return " ".join(ET.fromstring(picture.read_text()).itertext())  # noqa: S314


def test_there_are_pictures() -> None:
    assert len(PICTURES) >= 5


@svg
def test_a_picture_fits_a_page_and_can_be_read(picture: Path) -> None:
    text = picture.read_text()
    width = ET.fromstring(text).get("viewBox", "").split()[2]  # noqa: S314
    assert int(width) <= MAX_WIDTH_PX
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text)]
    assert sizes
    assert min(sizes) >= MIN_FONT_PX


@svg
def test_a_picture_has_both_colour_schemes_and_a_name_and_fetches_nothing(picture: Path) -> None:
    text = picture.read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    assert re.search(r"<title id=\"name\">\w", text)
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}


@svg
def test_a_picture_is_shown_on_a_page_with_words_for_those_who_do_not_see_it(picture: Path) -> None:
    pages = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    shown = re.compile(rf"!\[[^\]]{{20,}}\]\((?:docs/)?images/{picture.name}\)")
    assert any(shown.search(page.read_text()) for page in pages)


def test_the_life_of_a_group_shows_each_place_and_each_record() -> None:
    words = words_of(ROOT / "docs/images/group-life.svg")
    places = {place for move in MOVES for place in (*move.leaves, move.enters)}
    expected = {move.event.__name__ for move in MOVES} | {
        place.value.replace("_", " ") for place in places
    }
    assert {each for each in expected if each not in words} == set()


def test_one_weight_sync_names_its_parts_in_their_order() -> None:
    text = (ROOT / "docs/images/one-sync.svg").read_text()
    titles = re.findall(r'class="title" .*>(\w+)</text>', text)
    assert titles == ["begin", "transfer", "verify", "swap", "ack", "stamp"]
