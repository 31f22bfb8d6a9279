"""The tables of ARCHITECTURE.md that follow something through the code, file by file."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"
_ROW = re.compile(r"^\| `([\w/.]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def traced(section: str) -> list[tuple[str, str]]:
    """File and symbol of each row in the table of a section."""
    body = PAGE.read_text().split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    return _ROW.findall(body)
