"""The pages of ``docs/tutorials`` do what they say: each is followed, block by block, in one process."""

from pathlib import Path
from typing import Final

import pytest

from tests.support.tutorials import Page, Reader

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_does_what_it_says(path: Path, tmp_path: Path) -> None:
    page = Page.read(path)
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    Reader(home, folder).follow(page)
