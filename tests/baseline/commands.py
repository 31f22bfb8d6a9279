"""Output of the command line and the generators: recipes, wrong recipes, keys, commands, pages."""

import hashlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from typer.testing import CliRunner

from offbeat.config.schema import known_keys
from offbeat.launch.commands.main import app

WRONG_RECIPES = Path(__file__).with_name("wrong_recipes.txt")
_FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)? (?:GiB|MiB|KiB|GB|MB|s)\b")
"""Amounts of this machine's memory and disk, which differ from one minute to the next."""

_PAGES = ("docs/configuration.md", "docs/errors.md", "docs/journal.md", "docs/metrics.md")
_COMMANDS = (
    "",
    "--version",
    "--help",
    "trian recipes/quickstart.yaml",
    "train",
    "train no_such.yaml",
    "train recipes/quickstart.yaml trainer.threds=2",
    "train --resume no_such_run",
    "train --resume runs/x --run-dir runs/y",
    "dry-run no_such.yaml",
    "dry-run recipes/quickstart.yaml steps=0",
    "eval no_such_run",
    "check no_such.yaml",
    "config explain trainer.threds",
    "config explain trainer.threads",
    "config show no_such.yaml",
    "control no_such_run stop",
    "why no_such_run",
    "replay no_such_run",
    "watch no_such_run",
    "report no_such_run",
    "export no_such_run",
    "simulate no_such.yaml",
    "simulate recipes/quickstart.yaml --seeds 0",
    "submit no_such.yaml",
    "sweep no_such.yaml",
    "plan no_such.yaml",
    "verify-weights no_such_run",
    "retrain no_such_run",
)


def checked_recipes() -> dict[str, object]:
    """Return the exit code of ``check`` and its findings for each recipe."""
    return _checks(str(recipe) for recipe in sorted(Path("recipes").glob("*.yaml")))


def refused_recipes() -> dict[str, object]:
    """Return the exit code of ``check`` and its findings for each recipe that cannot work."""
    lines = WRONG_RECIPES.read_text(encoding="utf-8").splitlines()
    return _checks(line for line in lines if not line.startswith("#"))


def explained_keys() -> dict[str, object]:
    """Return the output of ``config explain`` by key, for a section its digest."""
    return {
        name: _digest(lines) if key.sections else lines
        for name, key in known_keys().items()
        for _, lines in [_command(["config", "explain", name])]
    }


def exit_codes() -> dict[str, object]:
    """Return exit code and first line of commands that start nothing."""
    return {line: _first_line(*_command(shlex.split(line))) for line in _COMMANDS}


def generated_pages() -> dict[str, object]:
    """Return the digest of each generated page. Tests compare the pages with their generators."""
    return {page: _digest(Path(page).read_text(encoding="utf-8").splitlines()) for page in _PAGES}


def _checks(recipes: Iterable[str]) -> dict[str, object]:
    found = dict[str, object]()
    for recipe in recipes:
        exit_code, lines = _command(["check", *shlex.split(recipe)])
        found[recipe] = [exit_code, *_findings(lines)]
    return found


def _command(arguments: list[str]) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "COLUMNS": "200"})
    return result.exit_code, [_without_figures(line) for line in result.output.splitlines()]


def _without_figures(line: str) -> str:
    return _FIGURE.sub("<amount>", line.replace(str(Path.cwd()), "<here>"))


def _findings(lines: list[str]) -> list[str]:
    """Return errors and warnings whole, and the subjects of what is in order."""
    start = next((at for at, line in enumerate(lines) if line.startswith("versions")), len(lines))
    end = next((at for at in range(start, len(lines)) if not lines[at]), len(lines))
    said = lines[:start] + lines[end:]
    return [line.partition(":")[0] if line.startswith("ok ") else line for line in said if line]


def _first_line(exit_code: int, lines: list[str]) -> list[object]:
    return [exit_code, next((line for line in lines if line), "")]


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
