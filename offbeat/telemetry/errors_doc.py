"""Generates ``docs/errors.md`` from the error classes and the tables of failures.

Usage: ``python -m offbeat.telemetry.errors_doc``.

The classes are read from the sources, so no optional package is imported. A class is listed if its
docstring has a paragraph ``Fix: ...``. The docstring's first paragraph is the meaning.
"""

import ast
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from offbeat.telemetry.failure_table import EVENTS, OTHER_REASONS, REASONS

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_PAGE: Final = Path("docs/errors.md")
_FAULTS: Final = Path("docs/fault_tests.toml")
_REPORT: Final = "Report it."

_SECTIONS: Final = {
    "Recipes, commands and run directories": (
        *("config", "doors.py", "launch", "runs", "run_files", "telemetry", "plugins/export"),
        *("plugins/planning", "plugins/retrain", "plugins/tensorboard"),
        *("plugins/verify_weights", "plugins/watch"),
        "messages/missing_package.py",
    ),
    "Prompts, environments and rewards": (
        *("environments", "plugins/agents", "plugins/images", "plugins/task_libraries"),
    ),
    "Runs and resumes": (
        *("controller", "messages", "sampler", "transfer_queue", "plugins/simulation"),
    ),
    "Models, trainers and checkpoints": (
        *("algorithms", "models", "trainers", "plugins/encoder_ranks", "plugins/lora"),
        *("plugins/megatron", "plugins/tensor_ranks"),
    ),
    "Engines and weight syncs": (
        *("generators", "weight_sync", "plugins/float8", "plugins/reshard", "plugins/vllm"),
    ),
    "Tests of your own parts": ("testing",),
}
"""Paths in the package, by section of the page."""

_HEAD: Final = """\
# Errors

Generated from the docstrings of the error classes and from `offbeat/telemetry/failure_table.py` by
`python -m offbeat.telemetry.errors_doc`; do not edit.

Search this page for the name in a run's last line or in a log. A command that refuses to start exits with 2. A run that
ends with an error exits with 1 and outcome `failed`. Its last line is
`run failed at step <s>, trainer version <v>: <Class>: <message>`; `(and N more)` counts further errors. Fix the cause;
`offbeat train --resume RUN` continues. [Failure modes](failure-modes.md) leads from a symptom to the cause. A fix that
starts with *None* says what offbeat does instead.
"""
_REPORTED: Final = """
## Please report

These errors mean that two parts of offbeat disagree. The run ends rather than train on. Send the
line, `config.yaml`, `journal/` and `logs/`. Secrets are redacted in config and logs, not in the
reasons of rewinds in the journal.

| error | meaning |
|---|---|
"""
_REASONS: Final = """
## Reasons of failed rollouts

*data*: retried `rollout.data_retries` times, then dropped. *infrastructure*: retried elsewhere. *bug*: ends the run.
If the reason is the name of an exception class, that is a bug, too.

| reason | kind | meaning | fix |
|---|---|---|---|
"""
_OTHERS: Final = """
Further reasons for another rollout or a drop, as `offbeat why` shows them:

| reason | meaning |
|---|---|
"""
_EVENTS: Final = """
## Events in the logs

A run survives these failures and counts them. The third column names the file in `logs/`.

| event | meaning | log | what follows |
|---|---|---|---|
"""
_INJECTED: Final = """
## Faults that tests inject

*Simulator*: kinds of faults of [the simulator](simulator.md); `every_kind_of_fault_fires_and_the_run_survives_it`
injects each. The other tests use real Ray actors, or are unit tests.

| fault | simulator | test |
|---|---|---|
"""


class ErrorClass(NamedTuple):
    """An error class as the page lists it."""

    name: str
    place: str  # path below the package
    meaning: str
    fix: str


def read_errors() -> list[ErrorClass]:
    """Return every error class with a fix in its docstring, sorted by name."""
    found = (
        _read_class(node, path.relative_to(_PACKAGE).as_posix())
        for path in sorted(_PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(error for error in found if error)


def document() -> str:
    """Return the whole page."""
    errors = read_errors()
    listed = [error for error in errors if error.fix != _REPORT]
    reported = [error for error in errors if error.fix == _REPORT]
    return "".join(
        (
            _HEAD,
            *(_section(title, listed) for title in _SECTIONS),
            _REPORTED,
            *_rows((f"`{error.name}`", error.meaning) for error in reported),
            _REASONS,
            *_rows((f"`{each.name}`", *each[1:]) for each in REASONS),
            _OTHERS,
            *_rows((f"`{name}`", meaning) for name, meaning in OTHER_REASONS),
            _EVENTS,
            *_rows((f"`{e.name}`", e.meaning, e.log, e.consequence) for e in EVENTS),
            _INJECTED,
            *_rows(_read_faults()),
        )
    )


def section_of(place: str) -> str:
    """Return the title of the section for a path below the package.

    Raises:
        LookupError: No section has the path.
    """
    lengths = {
        title: max((len(each) for each in places if place.startswith(each)), default=0)
        for title, places in _SECTIONS.items()
    }
    title = max(lengths, key=lambda each: lengths[each])
    if not lengths[title]:
        raise LookupError(f"{place}: add its room to a section of errors_doc.py")
    return title


def _section(title: str, errors: list[ErrorClass]) -> str:
    rows = _rows(
        (f"`{error.name}`", error.meaning, error.fix)
        for error in errors
        if section_of(error.place) == title
    )
    return f"\n## {title}\n\n| error | meaning | fix |\n|---|---|---|\n" + "".join(rows)


def _read_class(node: ast.ClassDef, place: str) -> ErrorClass | None:
    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
    fixes = [each for each in paragraphs[1:] if each.startswith("Fix: ")]
    if not fixes:
        return None
    meaning, fix = (" ".join(each.split()) for each in (paragraphs[0], fixes[0]))
    fix = fix.removeprefix("Fix: ")
    return ErrorClass(node.name, place, meaning, fix[0].upper() + fix[1:])


def _read_faults() -> Iterator[tuple[str, str, str]]:
    for fault in tomllib.loads(_FAULTS.read_text(encoding="utf-8"))["fault"]:
        kinds, tests = (", ".join(f"`{name}`" for name in fault[key]) for key in ("kinds", "tests"))
        yield fault["says"], kinds, tests


def _rows(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    return (f"| {' | '.join(_markdown(cell) for cell in row)} |\n" for row in rows)


def _markdown(text: str) -> str:
    linked = re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", text.replace("``", "`"))
    return linked.replace("|", "\\|")


def main() -> None:
    """Write the page; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    _PAGE.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
