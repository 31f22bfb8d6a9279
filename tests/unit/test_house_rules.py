"""Rules of the house that no linter knows: each test names one, its message says where it is broken."""

import ast
import builtins
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

parsed = cache(ast.parse)  # several rules walk the same trees

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "offbeat"
PURE_ROOMS = (
    *("messages", "config", "transfer_queue", "sampler", "controller", "runs", "run_files"),
)
DOORS = ("offbeat.transfer_queue.tensordict_codec",)
"""Modules of the pure rooms that import tensors; no other module of them does."""

REPLAYED_ROOMS = ("controller", "sampler", "transfer_queue")
"""The simulator runs these on a virtual clock from a seed, and again, bit for bit."""

FOREIGN_LIBRARIES = ("ray", "torch", "transformers", "tensordict", "vllm")

NOT_REPLAYABLE = re.compile(
    r"""
    time\.(time|monotonic|perf_counter|process_time)(_ns)? | time\.sleep
    | datetime\.(datetime|date)\.(now|utcnow|today)
    | random\.(?!Random$)\w+        # the module's functions share one hidden generator
    | uuid\.uuid[14] | os\.urandom | secrets\.\w+
    | asyncio\.to_thread            # a thread cannot be aborted, and runs when it likes
    """,
    re.VERBOSE,
)
UNTRUSTED_INPUT = re.compile(
    r"""
    (c?[Pp]ickle|cloudpickle|dill|marshal|shelve)(\..+)?
    | ray\.cloudpickle(\..+)? | multiprocessing\.connection\..+ | torch\.load
    | torch\.distributed(\..+)?\.\w+_object(_list)?     # object collectives unpickle what arrives
    | torch\.distributed(\..+)?\.TCPStore              # it listens everywhere, for everybody
    """,
    re.VERBOSE,
)
"""What runs code that somebody else has written, or takes messages from whoever sends some."""

READS_ITS_OWN_PICKLES = PACKAGE / "trainers/torch/state.py"
"""The table of contents of a checkpoint, by an unpickler that knows a few classes and no function."""

LOADS_CODE_OF_ITS_PARENT = PACKAGE / "config/by_value.py"
"""Functions that a program gives by value: bytes of the parent process, which are never on disk."""

FOREIGN_PATH = re.compile(r"(?<![\w.~$})/-])/(?:home|root|tmp|work|Users)/[\w.]")
"""A path that exists on one machine only. Behind a word, as in a URL, it is not such a path."""

WITHOUT_A_SUBJECT = re.compile(
    r"""
    (Of|As|Who|Whose|Whom|What|Which|Where|Whether|Whatever|Whoever|How|Why|It|Its|They|Those|That
    |The\ same|All\ that)\b
    """,
    re.VERBOSE,
)
"""Openings that point at something a reader has not seen yet: "Of all ranks but the first."."""


def modules_of(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (PACKAGE / room).rglob("*.py"))


def dotted_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name of a module stands for: ``{"t": "time", "sleep": "asyncio.sleep"}``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def resolved(node: ast.expr, names: dict[str, str]) -> str | None:
    """``datetime.datetime.now`` for ``dt.now`` after ``from datetime import datetime as dt``."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value, names)
        return f"{owner}.{node.attr}" if owner else None
    return None


def uses_of(pattern: re.Pattern[str], source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every imported thing in ``source`` whose full name matches."""
    tree = parsed(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = resolved(node, names)
            if name and pattern.fullmatch(name):
                yield node.lineno, name


def files_in_version_control() -> list[Path]:
    """Tracked files, and new ones that are not ignored; none where there is no git checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    names = listing.stdout.decode().split("\0")
    return sorted(ROOT / name for name in set(names) if name and (ROOT / name).is_file())


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t\nt.monotonic()",
        "from time import time\ntime()",
        "from datetime import datetime as dt\ndt.now()",
        "import random\nrandom.shuffle([])",
        "from uuid import uuid4\nuuid4()",
        "import asyncio\nasyncio.to_thread(print)",
    ],
)
def test_the_rule_about_replay_sees_through_aliases(source: str) -> None:
    assert list(uses_of(NOT_REPLAYABLE, source))


def test_what_the_simulator_replays_reads_no_wall_clock_no_hidden_randomness_and_no_thread() -> (
    None
):
    broken = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path in modules_of(*REPLAYED_ROOMS)
        for line, name in uses_of(NOT_REPLAYABLE, path.read_text())
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "from ray import cloudpickle as cp\ncp.loads(b'')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list\nbroadcast_object_list([])",
        "from torch import distributed as dist\ndist.TCPStore('', 0)",
        "import torch\ntorch.load('')",
    ],
)
def test_the_rule_about_untrusted_input_knows_an_offence(source: str) -> None:
    assert list(uses_of(UNTRUSTED_INPUT, source))


def test_no_module_unpickles_or_listens_for_everybody() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line} uses {name}: exchange typed msgpack, and meet at a "
        "rendezvous.StoreServer"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in {READS_ITS_OWN_PICKLES, LOADS_CODE_OF_ITS_PARENT}
        for line, name in uses_of(UNTRUSTED_INPUT, path.read_text())
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_loads_neither_ray_nor_torch(room: str) -> None:
    modules = [dotted_name(path) for path in modules_of(room)]
    modules = [module for module in modules if module not in DOORS]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {FOREIGN_LIBRARIES!r} if name in sys.modules))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []


@pytest.mark.parametrize("path", ["/home/ada/run", "see /tmp/x.json", "'/root/.cache'"])
def test_the_rule_about_paths_knows_one(path: str) -> None:
    assert FOREIGN_PATH.search(path)


def test_no_file_in_version_control_names_a_path_of_one_machine() -> None:
    files = [path for path in files_in_version_control() if path != Path(__file__).resolve()]
    if not files:
        pytest.skip("not a git checkout")
    broken: list[str] = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), start=1):
            if FOREIGN_PATH.search(line):
                broken.append(f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}")
    assert not broken, "\n".join(broken)


def test_no_file_in_version_control_is_named_like_an_option() -> None:
    files = files_in_version_control()
    if not files:
        pytest.skip("not a git checkout")
    names = [str(path.relative_to(ROOT)) for path in files]
    broken = [name for name in names if name.startswith("-") or "/-" in name]
    assert not broken, f"{broken}: remove each with: git rm -- ./NAME"


def test_a_test_file_has_a_name_that_no_other_has() -> None:
    # pytest imports test files by their names: `pytest -m long` collects all of them, and stops at a
    # second one. Those of vllm_engine run in an environment where no others do.
    folders = [path for path in (ROOT / "tests").iterdir() if path.name != "vllm_engine"]
    counts = Counter(path.name for folder in folders for path in folder.rglob("test_*.py"))
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert not twice, f"{twice}: rename one of each"


def test_an_installation_names_what_it_fetches() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert installs and not [line for line in installs if re.search(r"--quiet|\s-q\b", line)]


@pytest.mark.parametrize(
    "module",
    [
        "offbeat.telemetry.metrics_doc",
        "offbeat.telemetry.errors_doc",
        "offbeat.config.reference",
        "offbeat.config.peer_keys_doc",
        "offbeat.controller.moves_doc",
        "tests.proof_pages",
        "tools.api_pages",
        "tools.command_page",
    ],
)
def test_a_module_that_writes_a_page_refuses_arguments_and_only_prints_its_help(
    module: str, tmp_path: Path
) -> None:
    for argument, code in (("--help", 0), ("page.md", 2)):
        finished = subprocess.run(
            [sys.executable, "-m", module, argument],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == code, finished.stderr
        assert "usage: " in finished.stdout + finished.stderr
    assert not list(tmp_path.iterdir())


def untyped_libraries() -> list[str]:
    """Libraries that CONTRIBUTING.md lists as without types."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("| library |")[1].split("\n\n")[0].splitlines()[2:]
    return [name for row in table for name in row.split("|")[1].strip().split(", ")]


def test_types_are_weaker_only_where_a_listed_library_has_none() -> None:
    pattern = re.compile(r"^# pyright: .*\n(?:# pyright: .*\n)*(.*)", re.MULTILINE)
    files = {file: pattern.findall(file.read_text()) for file in PACKAGE.rglob("*.py")}
    listed = re.compile("|".join(rf"\b{name}\b" for name in untyped_libraries()), re.IGNORECASE)
    weaker = [(file.relative_to(PACKAGE), line) for file, lines in files.items() for line in lines]
    assert weaker
    assert [each for each in weaker if not listed.search(each[1])] == []


def test_the_docstring_of_a_room_lists_only_modules_that_exist() -> None:
    row = re.compile(r"^ *([a-z_]+(?:, [a-z_]+)*) {2,}\S", re.MULTILINE)
    rooms = {
        path.parent: ast.get_docstring(parsed(path.read_text())) or ""
        for path in PACKAGE.rglob("__init__.py")
    }
    listed = {room: ", ".join(row.findall(text)).split(", ") for room, text in rooms.items()}
    assert len(listed[PACKAGE / "plugins/megatron"]) > 20
    gone = [
        f"{room.relative_to(ROOT)}: {name}"
        for room, names in listed.items()
        for name in filter(None, names)
        if not (room / f"{name}.py").exists() and not (room / name).is_dir()
    ]
    assert gone == []


def test_only_the_doors_import_code_by_name() -> None:
    by_name = {"import_module", "__import__", "find_spec", "importlib", "importlib.util"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(parsed(path.read_text()))
        if (
            isinstance(node, ast.Import | ast.ImportFrom) and by_name & {a.name for a in node.names}
        )
        or (isinstance(node, ast.Name) and node.id == "__import__")
    ]
    assert {place.partition(":")[0] for place in found} == {"offbeat/doors.py"}, found


def test_a_handler_that_catches_everything_says_why() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (handler := line.partition("noqa: BLE001"))[1] and len(handler[2].split()) < 3
    ]
    assert not silent, f"say behind the noqa why nothing narrower is caught: {silent}"


def openings_without_a_subject(source: str) -> Iterator[tuple[int, str]]:
    """Line and first line of every docstring in ``source`` that starts with a pronoun."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and WITHOUT_A_SUBJECT.match(text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


@pytest.mark.parametrize(
    "text",
    [
        "Of all ranks but the first.",
        "What the loss reads.",
        "The same, of this rank.",
        "Whether it holds a version.",
        "Its weights, by name.",
    ],
)
def test_the_rule_about_docstrings_knows_an_offence(text: str) -> None:
    assert list(openings_without_a_subject(f'def f():\n    """{text}"""'))


def test_a_docstring_says_what_the_thing_is_or_does() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line} {text}: start with what the thing is (a class) or does "
        "(a function)"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in openings_without_a_subject(path.read_text())
    ]
    assert not broken, "\n".join(broken)


def test_every_method_of_a_port_says_what_it_promises() -> None:
    path = PACKAGE / "controller/ports.py"
    broken = [
        f"{path.relative_to(ROOT)}:{method.lineno} {port.name}.{method.name} has no docstring"
        for port in parsed(path.read_text()).body
        if isinstance(port, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in port.bases)
        for method in port.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not ast.get_docstring(method)
    ]
    assert not broken, "\n".join(broken)


RAISED = re.compile(r"^([A-Z]\w+):", re.MULTILINE)


def raised_names(docstring: str) -> set[str]:
    """Names of the exceptions that the ``Raises`` section of a cleaned docstring lists."""
    section = docstring.partition("Raises:\n")[2]
    lines = itertools.takewhile(lambda line: not line or line[0] == " ", section.splitlines())
    return set(RAISED.findall(inspect.cleandoc("\n" + "\n".join(lines))))


def test_every_exception_that_a_docstring_promises_exists() -> None:
    sources = {path: parsed(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    known = {
        node.name
        for tree in sources.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known |= {name for tree in sources.values() for name in imported_names(tree)} | set(
        dir(builtins)
    )
    broken = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name in sorted(raised_names(ast.get_docstring(node) or "") - known)
    ]
    assert not broken, "\n".join(broken)


def test_the_rule_about_promised_exceptions_finds_every_line_of_the_section() -> None:
    docstring = "Do it.\n\nRaises:\n    ValueError: One\n        of two.\n    Nonsense: The other.\n\nMore: text."
    assert raised_names(docstring) == {"ValueError", "Nonsense"}
