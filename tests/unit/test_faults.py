"""The faults of tests/faults.toml fit the tree: ``python -m tests.faults`` plants them."""

import pytest

from tests.faults import (
    PAGE,
    Fault,
    find_module,
    find_node,
    plant,
    read_faults,
    render_page,
)

FAULTS = read_faults()


def test_each_fault_has_an_id_of_its_own() -> None:
    ids = [fault.id for fault in FAULTS]
    assert ids == sorted(set(ids))
    assert len(ids) >= 120


def test_each_snippet_occurs_once_in_the_package() -> None:
    assert [fault.id for fault in FAULTS if find_module(fault) is None] == []


def test_each_test_that_catches_a_fault_exists() -> None:
    missing = {fault.id: test for fault in FAULTS for test in fault.tests if not find_node(test)}
    assert missing == {}


def test_the_page_of_faults_is_what_the_source_says() -> None:
    assert PAGE.read_text() == render_page(FAULTS), "run python -m tests.faults --page"


@pytest.mark.parametrize(
    "text",
    ["if a:\n    if b < 1:\n        c()\n", "if a:\n    if (\n        b<1\n    ):\n        c()\n"],
)
def test_a_snippet_is_found_however_it_is_laid_out(text: str) -> None:
    fault = Fault("F000", "", "", "b < 1", "b <= 1", [])
    assert "b <= 1" in plant(fault, text)


def test_further_lines_of_a_replacement_are_indented_with_the_snippet() -> None:
    fault = Fault("F000", "", "", "c()", "if d:\n    c()", [])
    assert plant(fault, "if a:\n    c()\n") == "if a:\n    if d:\n        c()\n"
