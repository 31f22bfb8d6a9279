"""Plants one fault at a time in a copy of the tree and runs the tests that have to fail.

``python -m tests.faults`` plants all faults of ``faults.toml``, ``--only F012,F030`` some of them.
``python -m tests.faults --page`` writes ``faults.md``. The tree itself is never changed.

A fault is a snippet of the package and its replacement. The snippet may stand in any module, but it
occurs there once; blanks and line breaks do not count. Further lines of a replacement are indented
relative to the line on which the snippet begins. A test is named by its function or class, wherever
its file is; where two files have the name, by ``file::name``; of its parameters, one in brackets.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = Path(__file__).with_suffix(".toml")
PAGE: Final = Path(__file__).with_suffix(".md")
LIMIT_S: Final = 600
COPIED: Final = ("offbeat", "tests")
NOT_LINKED: Final = {*COPIED, ".git", "runs"}
MISFITS: Final = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError")
"""Errors of a test whose fault does not fit the code any more: nothing was tested then."""
DEFINITION: Final = re.compile(
    r"^(?P<indent> *)(?:async )?def (?P<function>test_\w+)|^class (?P<cls>Test\w+)|^(?P<machine>Test\w+) = ",
    re.MULTILINE,
)
HEAD: Final = """\
# Faults that the tests catch

Each fault was planted and caught by the tests in its row. `make test-faults` plants all of them
again, one at a time, in a copy of the tree (`ARGS="--only F012,F030"`: some). I1 to I25 are
[invariants](../docs/invariants.md), R1 to R123 [requirements](../docs/requirements.md), T is a bug
that the simulator or a user once found. `python -m tests.faults --page` writes this page from
`faults.toml`, which holds the edits.

Larger bugs of the controller are classes in `plugins/simulation/planted`: `test_a_planted_bug_is_caught`
plants each of them at every run of the tests. So do `test_planted_layouts.py` and the tests in
`parity` with bugs that other systems had.

| fault | what is wrong | breaks | caught by |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A bug that a rebuilder could make, and the tests that catch it."""

    id: str
    says: str
    breaks: str
    find: str
    replace: str
    tests: list[str]


def read_faults() -> list[Fault]:
    """Return the faults of ``faults.toml`` in their order."""
    return [Fault(**row) for row in tomllib.loads(SOURCE.read_text())["fault"]]


@cache
def read_squeezed() -> dict[Path, str]:
    """Return the text of each module of the package without any blanks."""
    paths = sorted((ROOT / "offbeat").rglob("*.py"))
    return {path: "".join(path.read_text().split()) for path in paths}


@cache
def find_definitions() -> dict[str, list[str]]:
    """Return the pytest ids of each test function, test class and test case of a state machine."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        owner = ""
        for each in DEFINITION.finditer(path.read_text()):
            owner = each["cls"] or (owner if each["indent"] else "")
            name = each["function"] or each["cls"] or each["machine"]
            parts = [str(path.relative_to(ROOT)), owner if each["function"] else "", name]
            found.setdefault(name, []).append("::".join(filter(None, parts)))
    return found


def find_module(fault: Fault) -> Path | None:
    """Return the module with the snippet of a fault, or None if the snippet does not occur once."""
    snippet = "".join(fault.find.split())
    counts = {
        path: count for path, text in read_squeezed().items() if (count := text.count(snippet))
    }
    return next(iter(counts)) if list(counts.values()) == [1] else None


def find_node(test: str) -> str | None:
    """Return the pytest id of a test, or None if there is not exactly one of this name."""
    name, bracket, parameters = test.partition("[")
    file, _, own = name.rpartition("::")
    nodes = [each for each in find_definitions().get(own, []) if f"{file}.py::" in each or not file]
    return f"{nodes[0]}{bracket}{parameters}" if len(nodes) == 1 else None


def plant(fault: Fault, text: str) -> str:
    """Return the text of a module with the fault in the place of its snippet."""
    tokens = re.findall(r"\w+|[^\w\s]", fault.find)
    found = re.search(r"\s*".join(map(re.escape, tokens)), text)
    if found is None:
        raise LookupError(f"{fault.id}: {fault.find!r}")
    line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
    margin = line[: len(line) - len(line.lstrip())]
    replaced = fault.replace.replace("\n", f"\n{margin}")
    return text[: found.start()] + replaced + text[found.end() :]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy the package and the tests to a new directory; link everything else there."""
    with tempfile.TemporaryDirectory(prefix="offbeat-faults-") as name:
        for folder in COPIED:
            shutil.copytree(ROOT / folder, Path(name) / folder, symlinks=True)
        for each in ROOT.iterdir():
            if each.name not in NOT_LINKED:
                (Path(name) / each.name).symlink_to(each)
        yield Path(name)


def run_tests(tree: Path, nodes: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """Run tests in a copy; return ``passed``, ``failed``, or what kept them from running."""
    options = ["-x", "-q", "-rf", "--tb=no", "-m", "", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "CI": "1", "COLUMNS": "1000"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *nodes],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {limit_s:g} s"
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    is_misfit = any(line.partition(" - ")[2].startswith(MISFITS) for line in failures)
    if done.returncode == 1 and failures and not is_misfit:
        return "failed"
    if done.returncode == 0:
        return "passed"
    return f"no test ran: {(failures or done.stdout.splitlines() or [done.stderr])[-1]}"


def try_fault(fault: Fault, tree: Path) -> str:
    """Plant a fault in a copy, run its tests and restore the copy; return the verdict."""
    module, nodes = find_module(fault), [find_node(test) for test in fault.tests]
    if module is None:
        return "snippet missing"
    if None in nodes:
        return "test missing"
    there = tree / module.relative_to(ROOT)
    there.write_text(plant(fault, module.read_text()))
    try:
        outcome = run_tests(tree, [node for node in nodes if node])
    finally:
        shutil.copy2(module, there)
    return {"failed": "caught", "passed": "survived"}.get(outcome, outcome)


def try_all(faults: Sequence[Fault], jobs: int, *, stop_at_first: bool) -> dict[str, str]:
    """Try faults in as many copies as there are jobs; return the verdict of each by its id."""
    verdicts: dict[str, str] = {}
    trees = queue.SimpleQueue[Path]()

    def work(fault: Fault) -> None:
        if stop_at_first and set(verdicts.values()) - {"caught"}:
            return
        tree = trees.get()
        try:
            verdicts[fault.id] = try_fault(fault, tree)
        finally:
            trees.put(tree)
        print(f"{fault.id}  {verdicts[fault.id]:<16} {fault.says}", flush=True)  # noqa: T201

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            trees.put(stack.enter_context(copied_tree()))
        list(pool.map(work, faults))
    return verdicts


def run_without_faults(faults: Sequence[Fault]) -> str:
    """Run the tests of these faults in a copy without any fault; return ``passed`` or what failed."""
    nodes = {node for fault in faults for test in fault.tests if (node := find_node(test))}
    with copied_tree() as tree:
        return run_tests(tree, sorted(nodes), LIMIT_S * len(faults))


def render_page(faults: Sequence[Fault]) -> str:
    """Return the page ``faults.md``."""
    rows = [
        f"| {each.id} | {each.says} | {each.breaks} | {', '.join(f'`{test}`' for test in each.tests)} |\n"
        for each in faults
    ]
    return HEAD + "".join(rows)


def main() -> int:
    """Plant the faults that the command line names; return 1 unless each is caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--only", help="ids of faults, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree to work in")
    parser.add_argument("--first", action="store_true", help="stop at the first that is not caught")
    parser.add_argument("--page", action="store_true", help="only write faults.md")
    options = parser.parse_args()
    faults = read_faults()
    if options.page:
        PAGE.write_text(render_page(faults))
        return 0
    if options.only:
        faults = [each for each in faults if each.id in options.only.split(",")]
    if (outcome := run_without_faults(faults)) != "passed":
        sys.exit(f"the tests do not pass without a fault: {outcome}")
    counts = Counter(try_all(faults, options.jobs, stop_at_first=options.first).values())
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))  # noqa: T201
    return 0 if counts["caught"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
