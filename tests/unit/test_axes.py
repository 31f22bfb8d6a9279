"""Functions on arrays say which axes those have: in the name of the argument, or in the docstring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "offbeat"
ROOMS = ("algorithms/**/*.py", "generators/embedded/**/*.py", "transfer_queue/codec.py")
ARRAY = re.compile(r"\b(Tensor|NDArray|ndarray|Columns?)\b")
AXES_IN_NAME = re.compile(r"_[A-Z]+$")
"""``mask_N``; the legend of the module says what N is."""

AXES_IN_TEXT = re.compile(r"(?<!\w)\[[^\[\]]+\]")
"""``[N]``, ``[rows + 1]``; not ``dict[str, int]``."""


def without_axes(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each argument, or function that returns arrays, whose axes nobody names."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if AXES_IN_TEXT.search(ast.get_docstring(node) or ""):
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [(each.arg, each.annotation) for each in given] + [(node.name, node.returns)]
        for name, annotation in named:
            is_array = annotation is not None and ARRAY.search(ast.unparse(annotation))
            if is_array and not AXES_IN_NAME.search(name):
                yield node.lineno, f"{name} of {node.name}"


@pytest.mark.parametrize("room", ROOMS)
def test_whoever_takes_or_returns_arrays_names_their_axes(room: str) -> None:
    files = sorted(PACKAGE.glob(room))
    assert files
    broken = [
        f"{path.relative_to(PACKAGE)}:{line} {name}: name the axes, as in [N] or [rows, ...]"
        for path in files
        for line, name in without_axes(path.read_text())
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "def f(mask: Tensor): ...",
        "def f(mask_N: Tensor) -> Tensor: ...",
        'def f(columns: Columns):\n "As dict[str, int]."',
    ],
)
def test_the_rule_about_axes_knows_an_offence(source: str) -> None:
    assert list(without_axes(source))
