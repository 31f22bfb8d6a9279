"""docs/parity.md has a row for every layout that the suites measure."""

from pathlib import Path

from parity_cases import BOUND, CHUNKS, LOSSES
from parity_table import BACKENDS, EXPECTED, HEAD, PAGE, ParityTable, Row, read


def test_the_page_has_every_measurement_of_every_layout_and_no_other() -> None:
    rows = read(PAGE)
    assert {key: row.measurements for key, row in rows.items()} == EXPECTED
    assert {backend for backend, _ in rows} == set(BACKENDS)
    assert all(row.worst <= BOUND for row in rows.values())


def test_the_page_says_how_it_came_about() -> None:
    assert PAGE.read_text().startswith(HEAD)


def test_a_layout_that_was_not_run_keeps_its_row(tmp_path: Path) -> None:
    page = tmp_path / "parity.md"
    for layout, error in (("pp2, tied", 1e-15), ("tp2 x pp2, tied", 2e-15)):
        table = ParityTable()
        for chunks in CHUNKS:
            table.add("megatron", layout, "tokens", chunks, error)
        table.write(page)
    assert read(page) == {
        ("megatron", "pp2, tied"): Row(len(CHUNKS), 1e-15),
        ("megatron", "tp2 x pp2, tied"): Row(len(CHUNKS), 2e-15),
    }


def test_a_layout_that_was_measured_in_part_keeps_the_larger_error(tmp_path: Path) -> None:
    page = tmp_path / "parity.md"
    whole, part = ParityTable(), ParityTable()
    for loss in LOSSES:
        for chunks in CHUNKS:
            whole.add("megatron", "cp4", loss, chunks, 5e-15)
    part.add("megatron", "cp4", "tokens", 1, 1e-15)
    for table in (whole, part):
        table.write(page)
    assert read(page) == {("megatron", "cp4"): Row(len(LOSSES) * len(CHUNKS), 5e-15)}


def test_a_layout_that_was_measured_completely_has_its_new_error(tmp_path: Path) -> None:
    page = tmp_path / "parity.md"
    for error in (5e-15, 1e-15):
        table = ParityTable()
        for chunks in CHUNKS:
            table.add("megatron", "pp2, tied", "tokens", chunks, error)
        table.write(page)
    assert read(page)["megatron", "pp2, tied"].worst == 1e-15
