"""``offbeat init``: writes a directory that is ready to train, with all files that users change."""

import enum
import os
import shlex
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, NoReturn

import typer

from offbeat.doors import is_installed
from offbeat.launch.commands.arguments import refuse
from offbeat.messages.text import list_names

_RENAMED: Final = {"gitignore": ".gitignore"}
"""Stored and real names of files. Under its real name, each would affect this repository."""

_RECIPE: Final = "recipe.yaml"
_WITH_LOSS: Final = "algorithm.loss.target=losses:loss"

_MOST_NAMED: Final = 3
"""Maximum existing files that a refusal lists."""


class Starter(enum.StrEnum):
    """A directory of the package that ``offbeat init`` copies."""

    REWARD = "reward"
    AGENT = "agent"
    LOSS = "loss"

    @property
    def run(self) -> str:
        """Return the name of the starter's run."""
        return "agent-starter" if self is Starter.AGENT else "starter"


def write_starter(folder: Path, starter: Starter = Starter.REWARD) -> None:
    """Write a starter into ``folder``, create the folder if missing, and print the next steps.

    No existing file is replaced. If any exists, exit with code 2 before anything is written.
    """
    sources = _sources(starter)
    if starter is Starter.LOSS and not (folder / _RECIPE).exists():
        sources += _sources(Starter.REWARD)
    content = {name: each for name, each in sources if not name.startswith("__pycache__/")}
    try:
        taken = [name for name in content if os.path.lexists(folder / name)]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _cannot_write(folder, error)
    if taken:
        refuse(
            f"{folder} already has {list_names(taken, _MOST_NAMED)}, and nothing is "
            "overwritten. Name another directory: offbeat init DIRECTORY"
        )
    try:
        for name, source in content.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(source.read_bytes())
    except OSError as error:
        _cannot_write(folder, error)
    typer.echo(_next_steps(folder, len(content), starter))


def _sources(starter: Starter) -> list[tuple[str, Traversable]]:
    return _walk(files("offbeat.launch.commands") / "starters" / starter, "")


def _cannot_write(folder: Path, error: OSError) -> NoReturn:
    refuse(
        f"{folder} cannot be written: {error.strerror}: {error.filename}. "
        "Name another directory: offbeat init DIRECTORY"
    )


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = list[tuple[str, Traversable]]()
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{prefix}{_RENAMED.get(each.name, each.name)}"
        found += _walk(each, f"{name}/") if each.is_dir() else [(name, each)]
    return found


def _next_steps(folder: Path, written: int, starter: Starter) -> str:
    start = [] if folder.resolve() == Path.cwd() else [f"  cd {shlex.quote(str(folder))}"]
    is_agent = starter is Starter.AGENT
    if is_agent and not is_installed("openai"):
        start.append("  pip install 'offbeat[agents]'   OpenAI's client, which agent.py imports")
    checked = "model, tasks, agent" if is_agent else "model, prompts, reward"
    lasts = "some minutes" if is_agent else "a minute"
    if starter is Starter.LOSS:
        return "\n".join(
            [
                f"{folder}: {written} files",
                "",
                *start,
                "  python test_losses.py                                        proves the loss",
                f"  offbeat check {_RECIPE} {_WITH_LOSS}   the loss too",
                f"  offbeat train {_RECIPE} {_WITH_LOSS}   or write it into the recipe",
                "",
                "losses.py shows the arguments and the result of a loss; more: docs/algorithms.md#your-own-loss",
            ]
        )
    return "\n".join(
        [
            f"{folder}: {written} files",
            "",
            *start,
            f"  offbeat check recipe.yaml       {checked}, this machine",
            f"  offbeat train recipe.yaml       {lasts}; writes runs/{starter.run}",
            f"  offbeat report {f'runs/{starter.run}':<16} one HTML page of the run",
        ]
    )
