import ast
import re
from pathlib import Path
from typing import NamedTuple

from offbeat.plugins.simulation.faults import KINDS
from offbeat.telemetry.errors_doc import document, read_errors, section_of
from offbeat.telemetry.failure_table import EVENTS, OTHER_REASONS, REASONS

ROOT = Path(__file__).resolve().parents[3]
SOURCES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "offbeat").rglob("*.py"))
    if path.name != "failure_table.py" and "simulation" not in path.parts
}
MAX_CELL = 110
"""Characters of a cell: two lines of the site."""


class DefinedError(NamedTuple):
    bases: tuple[str, ...]
    is_raised: bool


def own_errors() -> dict[str, DefinedError]:
    """Return the subclasses of ``OffbeatError`` by name."""
    nodes = [node for tree in SOURCES.values() for node in ast.walk(tree)]
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    classes = {
        node.name: DefinedError(tuple(map(ast.unparse, node.bases)), node.name in called)
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }

    def is_own(name: str) -> bool:
        return name == "OffbeatError" or any(map(is_own, getattr(classes.get(name), "bases", ())))

    return {name: each for name, each in classes.items() if is_own(name)}


def literals() -> set[str]:
    return {
        node.value
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_the_page_of_errors_is_what_docstrings_and_tables_say() -> None:
    page = ROOT / "docs" / "errors.md"
    assert page.read_text(encoding="utf-8") == document(), (
        "docs/errors.md is out of date; run: python -m offbeat.telemetry.errors_doc"
    )


def test_every_error_that_is_not_only_a_base_says_its_fix() -> None:
    errors = own_errors()
    bases = {base for each in errors.values() for base in each.bases}
    silent = errors.keys() - {error.name for error in read_errors()}
    assert {name for name in silent if name not in bases or errors[name].is_raised} == set(), (
        "add a paragraph 'Fix: ...' to the docstring"
    )


def test_every_error_has_a_section_of_the_page() -> None:
    assert {section_of(error.place) for error in read_errors()}


def test_every_reason_and_event_of_the_tables_is_in_the_code() -> None:
    names = [each.name for each in (*REASONS, *EVENTS)]
    assert len(names) == len(set(names))
    assert {*names, *dict(OTHER_REASONS)} - literals() == set()


def test_every_reason_that_the_code_spells_out_is_in_the_table() -> None:
    makers = {"make_failure", "RolloutFailed", "BadReward", "RewardFailed"}
    spelled = {
        argument.value
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    reasons = {each for each in spelled if re.fullmatch("[a-z_]+", each)}
    assert len(reasons) > 15
    assert reasons - {each.name for each in REASONS} - {"cancelled"} == set()


def test_every_fault_of_the_simulator_is_in_the_table_of_faults() -> None:
    injected = document().partition("## Faults that tests inject")[2]
    assert {kind for kind in KINDS if f"`{kind}`" not in injected} == set()


def test_no_cell_is_longer_than_two_lines() -> None:
    cells = [cell for error in read_errors() for cell in (error.meaning, error.fix)]
    cells += [cell for row in (*REASONS, *EVENTS) for cell in row]
    assert {cell for cell in cells if len(cell) > MAX_CELL} == set()
