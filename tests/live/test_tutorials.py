"""The pages of ``docs/tutorials`` do what they say: each is followed, block by block, in one process."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from tests.support.tutorials import Page, Reader

DOCS: Final = Path(__file__).parents[2] / "docs"
NEEDS_AGENTS: Final = pytest.mark.skipif(
    find_spec("openai") is None, reason="the extra agents is not installed"
)
PAGES: Final = [
    *sorted((DOCS / "tutorials").glob("*.md")),
    pytest.param(DOCS / "your-agent.md", marks=NEEDS_AGENTS),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_does_what_it_says(path: Path, tmp_path: Path) -> None:
    page = Page.read(path)
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    Reader(home, folder).follow(page)
