"""The table of moves is complete while the package is rebuilt."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_has_its_place_in_the_table_of_moves() -> None:
    with (ROOT / "docs" / "moves.csv").open(encoding="utf-8") as file:
        placed = {place for row in csv.DictReader(file) for place in row.values()}
    files = (path.relative_to(ROOT) for path in (ROOT / "offbeat").rglob("*.py"))
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    starters = {name for name in names if name.startswith("offbeat.launch.commands.starters.")}
    assert names - starters <= placed
