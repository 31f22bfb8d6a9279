"""Move and merge modules to a column of ``docs/moves.csv``: ``python tools/move_modules.py part_2``.

A row names a module, its place after part 2 of the rebuild, and its final place. Rows with one
destination merge their modules into one file, imported modules first. Imports, dotted names in
strings, and paths in pages, tests, benchmarks and pyproject follow. A merge that would change the
meaning of a name is refused, and nothing is written then. Run ``make format`` afterwards.
"""

import argparse
import ast
import csv
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

TABLE = Path("docs/moves.csv")
TEXTS = ("*.py", "*.pyi", "*.md", "*.toml", "*.yaml", "*.yml", "Makefile", "Dockerfile")
COLUMNS = ("module", "part_2", "final")
KEPT = (TABLE, Path("CHANGELOG.md"))


class CannotMerge(Exception):
    """Modules that do not fit into one file as they are."""


@dataclass(frozen=True)
class Module:
    """A module, cut into its docstring, its imports and the rest."""

    name: str
    docstring: str
    comments: str  # between docstring and imports, such as rules of pyright
    imports: tuple[str, ...]
    typing_imports: tuple[str, ...]
    body: str
    defined: frozenset[str]
    bound: dict[str, str]  # imported name -> the import that binds it
    needs: frozenset[str]  # modules it imports while it is loaded


def path_of(name: str) -> Path:
    """Return the file of a module, of a package its ``__init__.py``."""
    base = Path(*name.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def read(name: str) -> Module:
    """Read and cut one module."""
    source = path_of(name).read_text(encoding="utf-8")
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    taken, imports, typing_imports = set[int](), list[ast.stmt](), list[ast.stmt]()
    docstring = ast.get_docstring(tree, clean=False) or ""
    for place, node in enumerate(tree.body):
        is_doc = place == 0 and docstring
        is_import = isinstance(node, (ast.Import, ast.ImportFrom))
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_import:
            imports.append(node)
        elif is_typing and isinstance(node, ast.If):
            typing_imports += node.body
        elif not is_doc:
            continue
        taken.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    first = next((node.lineno - 1 for node in tree.body if not _is_text(node)), len(lines))
    comments = [number for number in range(first) if lines[number].startswith("#")]
    taken.update(comments)
    return Module(
        name,
        docstring,
        "".join(lines[number] for number in comments),
        tuple(_text(node, lines) for node in imports),
        tuple(_text(node, lines).strip() for node in typing_imports),
        "".join(line for number, line in enumerate(lines) if number not in taken).strip("\n"),
        frozenset(_defined(tree)),
        _bound([*imports, *typing_imports]),
        frozenset(_modules(imports)),
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _text(node: ast.stmt, lines: list[str]) -> str:
    return "".join(lines[node.lineno - 1 : node.end_lineno])


def _defined(tree: ast.Module) -> list[str]:
    names = list[str]()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [
                each.id
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            ]
    return [name for name in names if name != "__all__"]


def _bound(imports: list[ast.stmt]) -> dict[str, str]:
    bound = dict[str, str]()
    for node in imports:
        for alias in getattr(node, "names", ()):
            source = getattr(node, "module", "")
            bound[alias.asname or alias.name] = f"{source} {alias.name}"
    return bound


def _modules(imports: list[ast.stmt]) -> list[str]:
    named = list[str]()
    for node in imports:
        if isinstance(node, ast.ImportFrom):
            named += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
    return named


def merged(destination: str, modules: list[Module]) -> str:
    """Return the text of one module made of several.

    Raises:
        CannotMerge: A name means two things, or the modules import one another in a circle.
    """
    names = {module.name for module in modules}
    graph = {module.name: module.needs & names - {module.name} for module in modules}
    by_name = {module.name: module for module in modules}
    try:
        ordered = [by_name[name] for name in TopologicalSorter(graph).static_order()]
    except CycleError as circle:
        raise CannotMerge(f"{destination}: {circle.args[1]} import one another") from None
    main = by_name.get(destination) or max(modules, key=lambda module: len(module.body))
    ordered = _with_own_privates(ordered, main)
    _check_names(destination, ordered, names)
    own = _own_imports(names)
    imports = [text for module in ordered for text in module.imports if not own.search(text)]
    typing_imports = [
        text for module in ordered for text in module.typing_imports if not own.search(text)
    ]
    bodies = [_without_own(module.body, own) for module in ordered]
    guarded = (
        ["if TYPE_CHECKING:\n" + "".join(_indented(text) for text in typing_imports)]
        if typing_imports
        else []
    )
    head = f'"""{main.docstring}"""\n\n' if main.docstring else ""
    head += "".join(dict.fromkeys(module.comments for module in ordered)) + "\n"
    return (
        head + "".join(imports) + "\n" + "\n".join(guarded) + "\n\n" + "\n\n\n".join(bodies) + "\n"
    )


def _with_own_privates(modules: list[Module], main: Module) -> list[Module]:
    """Rename private names that several modules define: each but the main one names its module."""
    counts = Counter(name for module in modules for name in module.defined)
    shared = {name for name, count in counts.items() if count > 1 and name.startswith("_")}
    renamed = list[Module]()
    for module in modules:
        body, defined = module.body, module.defined
        for name in sorted(shared & defined if module is not main else ()):
            leaf = module.name.rpartition(".")[2]
            new = f"_{leaf.upper() if name.isupper() else leaf}{name}"
            body = re.sub(rf"(?<![\w.]){name}\b", new, body)
            defined = defined - {name} | {new}
        renamed.append(replace(module, body=body, defined=defined))
    return renamed


def _own_imports(names: set[str]) -> re.Pattern[str]:
    return re.compile(
        rf"^\s*from (?:{'|'.join(re.escape(name) for name in sorted(names))}) import ",
        re.MULTILINE,
    )


def _without_own(body: str, own: re.Pattern[str]) -> str:
    """Drop imports of the merged modules that stand inside functions."""
    lines = body.splitlines(keepends=True)
    kept, inside = list[str](), False
    for line in lines:
        inside = inside or bool(own.match(line))
        if not inside:
            kept.append(line)
        elif "(" not in line or ")" in line:
            inside = False
        if inside and ")" in line:
            inside = False
    return "".join(kept)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _check_names(destination: str, modules: list[Module], names: set[str]) -> None:
    twice = [
        name for name, count in Counter(n for m in modules for n in m.defined).items() if count > 1
    ]
    bound = dict[str, str]()
    for module in modules:
        for name, source in module.bound.items():
            if source.split(" ")[0] not in names and bound.setdefault(name, source) != source:
                twice.append(name)
    twice += [n for m in modules for n in m.defined if n in bound]
    if twice:
        raise CannotMerge(f"{destination}: {', '.join(sorted(set(twice)))} would mean two things")


def follow(text: str, moves: dict[str, str]) -> str:
    """Return text with dotted names and paths of moved modules replaced."""
    for old, new in moves.items():
        parent, _, leaf = old.rpartition(".")
        new_parent, _, new_leaf = new.rpartition(".")
        named = leaf if leaf == new_leaf else f"{new_leaf} as {leaf}"
        whole = rf"from {re.escape(parent)} import {leaf}$"
        text = re.sub(whole, f"from {new_parent} import {named}", text, flags=re.MULTILINE)
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text)
        path, new_path = old.replace(".", "/"), new.replace(".", "/")
        text = re.sub(rf"(?<![\w]){re.escape(path)}\.py\b", f"{new_path}.py", text)
        short, new_short = path.partition("/")[2], new_path.partition("/")[2]
        if "/" in short:
            text = re.sub(rf"(?<![\w/]){re.escape(short)}\.py\b", f"{new_short}.py", text)
    return text


def tracked() -> list[Path]:
    """Return the files whose text may name a module."""
    listed = subprocess.run(["git", "ls-files", *TEXTS], capture_output=True, text=True, check=True)
    return [
        Path(line)
        for line in listed.stdout.splitlines()
        if Path(line) not in KEPT and Path(line).exists()
    ]


def _write(groups: dict[str, list[str]], texts: dict[str, str]) -> None:
    for new, olds in groups.items():
        keeper = next((name for name in olds if name == new), olds[0])
        is_package = path_of(keeper).name == "__init__.py"
        place = Path(*new.split("."))
        target = place / "__init__.py" if is_package else place.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        if keeper != new:
            subprocess.run(["git", "mv", path_of(keeper), target], check=True)
        if texts[new]:
            target.write_text(texts[new], encoding="utf-8")
        gone = [path_of(name) for name in olds if name not in (keeper, new)]
        if gone:
            subprocess.run(["git", "rm", "-qf", *gone], check=True)


def _follow_everywhere(moves: dict[str, str]) -> None:
    for file in tracked():
        before = file.read_text(encoding="utf-8")
        if (after := follow(before, moves)) != before:
            file.write_text(after, encoding="utf-8")


def main() -> int:
    """Apply the rows of one part; return 1 if any merge is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("column", choices=COLUMNS[1:])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", help="destinations that start with this")
    arguments = parser.parse_args()
    with TABLE.open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    before = COLUMNS[COLUMNS.index(arguments.column) - 1]
    places = {row[before]: row[arguments.column] for row in rows}
    moves = {old: new for old, new in places.items() if old != new and path_of(old).is_file()}
    moves = {old: new for old, new in moves.items() if new.startswith(arguments.only)}
    groups = dict[str, list[str]]()
    for old, new in moves.items():
        groups.setdefault(new, [new] if path_of(new).is_file() and new not in moves else []).append(
            old
        )
    texts, refused = dict[str, str](), list[str]()
    for new, olds in groups.items():
        try:
            texts[new] = merged(new, [read(name) for name in olds]) if len(olds) > 1 else ""
        except CannotMerge as error:
            refused.append(str(error))
    print(
        *(f"refused: {line}" for line in refused),
        f"{len(moves)} modules, {len(groups)} files",
        sep="\n",
    )
    if refused or arguments.dry_run:
        return 1 if refused else 0
    _write(groups, texts)
    _follow_everywhere(moves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
