"""The tables that follow something through the code, file by file."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "One prompt group": "ARCHITECTURE.md",
    "One weight version": "ARCHITECTURE.md",
    "One image": "docs/images.md",
    "One turn": "ARCHITECTURE.md",
}
"""Page by the first words of the section that has the table."""
_ROW = re.compile(r"^\| `([\w/.]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def traced(section: str) -> list[tuple[str, str]]:
    """File and symbol of each row in the table of a section."""
    body = (ROOT / PAGES[section]).read_text().split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    return _ROW.findall(body)
