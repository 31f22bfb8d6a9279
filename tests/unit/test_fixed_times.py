"""Every deadline and interval that no recipe key sets has a name and a row in docs/supervision.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offbeat"
NAME = re.compile(r"_?[A-Z_]*(?<!_PER)_S")
ROW = re.compile(r"\| ([\d.]+) \| .+ \| `([\w/.]+)` \| `(\w+)` \|")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith("plugins/simulation/"):
            yield file, ast.parse(path.read_text())


def number(node: ast.expr | None) -> float | None:
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return float(node.value) if is_number else None  # pyright: ignore -- as just checked


def constants(module: ast.Module) -> Iterator[tuple[str, float]]:
    """Names and values of a module's constants in seconds."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            value = number(node.value)
            if isinstance(target, ast.Name) and NAME.fullmatch(target.id) and value is not None:
                yield target.id, value


def numeric_defaults(module: ast.Module) -> Iterator[str]:
    """Names of arguments and fields in seconds whose default is a number other than 0."""
    for node in ast.walk(module):
        if isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            names = positional[len(positional) - len(node.defaults) :] + node.kwonlyargs
            defaults = [*node.defaults, *node.kw_defaults]
            pairs = [(each.arg, value) for each, value in zip(names, defaults, strict=True)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        else:
            continue
        yield from (name for name, value in pairs if name.endswith("_s") and number(value))


def test_the_table_of_times_is_that_of_the_code() -> None:
    of_code = {
        (file, name): value for file, module in modules() for name, value in constants(module)
    }
    text = (ROOT / "docs/supervision.md").read_text()
    of_table = {(file, name): float(value) for value, file, name in ROW.findall(text)}
    assert of_table == of_code


def test_no_default_in_seconds_is_a_bare_number_but_of_recipe_keys_and_options() -> None:
    found = [
        f"{file}: {name}"
        for file, module in modules()
        if not file.startswith(("config/", "launch/commands/"))
        and not file.endswith(("/plugin.py", "/section.py"))
        for name in numeric_defaults(module)
    ]
    assert not found, f"give each a constant, and that a row in docs/supervision.md: {found}"
