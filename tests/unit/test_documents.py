"""What the documents say of the code is true: files, symbols and tests exist, lists are complete."""

import ast
import builtins
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from offbeat.launch.commands.main import app
from tests.proof_pages import PAGES as PROOF_PAGES
from tests.support.architecture import PAGES as PAGES_OF_TABLES
from tests.support.architecture import traced

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
MAX_LINES, MAX_COLUMNS = 120, 100
MAX_PAGE_COLUMNS = 120
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)


def command_names(group: Any, before: str = "") -> set[str]:
    """Names of all commands of a group, such as ``train`` and ``config show``."""
    names = set[str]()
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        names |= command_names(command, f"{name} ") if is_group else {before + name}
    return names


def defined_names(path: Path) -> set[str]:
    """Dotted names of the classes and functions of a module, methods included."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = (
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            names |= {node.name, *(f"{node.name}.{each.name}" for each in members)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


def test_the_architecture_fits_in_one_reading() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("section", PAGES_OF_TABLES)
def test_each_traced_file_defines_the_symbol_beside_it(section: str) -> None:
    rows = traced(section)
    assert rows
    missing = [
        f"{file}: {symbol}"
        for file, symbol in rows
        if symbol not in defined_names(ROOT / "offbeat" / file)
    ]
    assert missing == []


@pytest.mark.parametrize(
    "page",
    [
        "ARCHITECTURE.md",
        "docs/supervision.md",
        "docs/invariants.md",
        "docs/requirements.md",
        "tests/support/README.md",
        "README.md",
    ],
)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_site_has_a_place_for_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"^ +- (?:\w+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    folders = (ROOT / "docs", ROOT / "docs" / "tutorials")
    pages = {path for folder in folders for path in folder.glob("*.md")}
    assert set(listed) >= {path.relative_to(ROOT / "docs").as_posix() for path in pages}
    assert len(listed) == len(set(listed))
    assert re.findall(r"^  - (\w+):$", navigation, re.MULTILINE) == [
        "Start",
        "Guides",
        "Reference",
        "Internals",
    ]


@pytest.mark.plugins  # some commands are of plug-ins
def test_the_page_of_commands_has_a_section_for_each() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    assert set(re.findall(r"^## offbeat (.+)$", page, re.MULTILINE)) == command_names(
        get_command(app)
    )


def test_every_room_is_in_the_map() -> None:
    rooms = {path.name for path in (ROOT / "offbeat").iterdir() if (path / "__init__.py").exists()}
    room_map = TEXT.split("## Rooms", 1)[1]
    assert {room for room in rooms if not re.search(rf"\b{room}\b", room_map)} == set()


def test_every_key_a_newcomer_is_sent_to_exists() -> None:
    known = set(
        re.findall(r"^- `([\w.]+)`", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    )
    rows = [
        line
        for line in (ROOT / "docs/peer-keys.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    named = {key for row in rows for key in re.findall(r"`([\w.]+)`", row.split("|")[2])}
    assert len(named) > 100
    engine_args = {key for key in named if key.startswith("generator.vllm.engine_args.")}
    assert named - known - engine_args == set()


def shown_files(page: Path) -> set[str]:
    """Names of the files that a page shows in full."""
    return set(re.findall(r"^```\w+ title=\"(.+)\"$", page.read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_file_that_a_page_names_exists(page: Path) -> None:
    tests = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("tests", "benchmarks", "offbeat/launch/commands/starters")
        for path in (ROOT / folder).rglob("test_*.py")
    ]
    named = set(re.findall(r"(?:\w+/)*test_\w+\.py", page.read_text())) - shown_files(page)
    assert {name for name in named if not any(test.endswith(f"/{name}") for test in tests)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    """A file of a reader's own is called ``my_...``, or is a block of the page."""
    modules = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("offbeat", "tests", "benchmarks", "examples", "tools", "docs")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = set(re.findall(r"`((?:\w+/)*(?!my_)\w+\.py)`", page.read_text())) - shown_files(page)
    assert {
        name for name in named if not any(each.endswith(f"/{name}") for each in modules)
    } == set()


def test_the_page_of_helpers_names_each_of_them() -> None:
    page = (ROOT / "tests/support/README.md").read_text()
    named = {word for each in re.findall(r"`([\w.]+)`", page) for word in each.split(".")}
    helpers = {path.stem for path in (ROOT / "tests/support").glob("*.py")} - {"__init__"}
    assert helpers - named == set()


@pytest.mark.parametrize("path", PROOF_PAGES, ids=lambda path: path.name)
def test_a_page_of_proofs_is_what_its_rows_say(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PROOF_PAGES[path](), (
        f"{path.name} is out of date; run: python -m tests.proof_pages"
    )


def test_every_requirement_has_a_row() -> None:
    page = (ROOT / "docs/requirements.md").read_text()
    rows = re.findall(r"^\| (\d[\d, ]*) \| .+? \| (?:\*\*(\w+)\*\*: )?.+ \|$", page, re.MULTILINE)
    numbers = sorted(int(number) for numbers, _ in rows for number in numbers.split(", "))
    assert numbers == list(range(1, 124))
    assert {verdict for _, verdict in rows} <= {"", "otherwise", "partly", "missing"}


@pytest.mark.parametrize("name", ["requirements", "track-record", "errors"])
def test_every_test_and_file_that_the_page_names_exists(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text()
    sentences = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"def test_(\w+)", path.read_text())
    }
    named = set(re.findall(r"`([a-z]\w{23,})`", page))
    assert len(named) > 20
    assert named - sentences == set()
    files = set(re.findall(r"`((?:tests/)?\w+/[\w/]+(?:\.py|/))`", page))
    places = (ROOT, ROOT / "offbeat", ROOT / "tests/unit")
    assert {each for each in files if not any((place / each).exists() for place in places)} == set()


def test_the_layers_shown_to_a_contributor_are_those_of_the_linter() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        each
        for each in config["tool"]["importlinter"]["contracts"]
        if each["name"] == "imports point downwards"
    )
    linted = " > ".join(layer.replace("(", "").replace(")", "") for layer in contract["layers"])
    (shown,) = re.findall(
        r"^    (plugins >[^`]*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert " ".join(shown.split()) == linted


def documented_arguments(node: ast.AST) -> set[str]:
    """Names that the ``Args:`` section of a docstring explains."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", ast.get_docstring(node) or "", re.MULTILINE)
    return (
        set(re.findall(r"^ {4}\*{0,2}(\w+):", section.group(1), re.MULTILINE)) if section else set()
    )


def names_in_signature(node: ast.AST) -> set[str]:
    """Parameters of a function; of a class, its fields and the parameters of its methods."""
    return {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)} | {
        each.target.id
        for each in ast.walk(node)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def test_a_docstring_explains_only_arguments_that_exist() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {sorted(names)}"
        for path in (ROOT / "offbeat").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and (names := documented_arguments(node) - names_in_signature(node))
    ]
    assert unknown == []


def long_lines(page: str) -> list[int]:
    """Numbers of the lines of running text that are too long; tables, code and addresses may be."""
    found, in_code = list[int](), False
    for number, line in enumerate(page.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not (in_code or line.startswith("|") or "://" in line):
            found += [number] if len(line) > MAX_PAGE_COLUMNS else []
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_read_in_a_narrow_window(page: Path) -> None:
    assert long_lines(page.read_text()) == []


def test_the_rule_about_long_lines_spares_tables_code_and_addresses() -> None:
    long = "word " * 30
    assert long_lines(f"{long}\n| {long}|\n```\n{long}\n```\n{long}") == [1, 6]
    assert long_lines(f"[page](https://{long})") == []


def test_every_error_that_the_page_of_errors_names_is_a_class() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    classes = {
        node.name
        for path in (ROOT / "offbeat").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = set(re.findall(r"`([A-Z]\w+)`", page)) - set(dir(builtins))
    assert len(named) > 90
    assert {name for name in named if not name.isupper()} - classes == set()
