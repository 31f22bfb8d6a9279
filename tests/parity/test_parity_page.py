"""docs/parity.md has the rows that the suites measure."""

from pathlib import Path

from parity_cases import BOUND, CHUNKS, PAGE_CASES
from parity_table import BACKENDS, HEAD, PAGE, ParityTable, read


def test_the_page_has_every_row_of_every_backend_and_no_other() -> None:
    rows = read(PAGE)
    assert rows.keys() == PAGE_CASES
    assert {backend for backend, *_ in rows} == set(BACKENDS)
    for errors in rows.values():
        assert errors.keys() == set(CHUNKS)
        assert all(float(error) <= BOUND for error in errors.values())


def test_the_page_says_how_it_came_about() -> None:
    assert PAGE.read_text().startswith(HEAD)


def test_what_was_not_run_stays_as_it_was(tmp_path: Path) -> None:
    page = tmp_path / "parity.md"
    for layout, error in (("dp2", 1e-15), ("tp2", 2e-15)):
        table = ParityTable()
        table.add("megatron", layout, "tokens", 2, error)
        table.write(page)
    assert read(page) == {
        ("megatron", "dp2", "packed", "tokens"): {2: "1.0e-15"},
        ("megatron", "tp2", "packed", "tokens"): {2: "2.0e-15"},
    }
