"""``offbeat init``: a directory that trains at once, with everything that a first user changes."""

import os
import shlex
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, NoReturn

import typer

from offbeat.messages.exit_codes import REFUSED

_RENAMED: Final = {"gitignore": ".gitignore"}
"""Names of files that would act on this repository under their own name."""

_MOST_NAMED: Final = 3
"""Files that a refusal lists; an old starter has all of them."""


def write_starter(folder: Path) -> None:
    """Write the starter into ``folder``, which is made if need be, and print what to do next.

    No existing file is replaced: exit code 2, before anything is written.
    """
    starter = files("offbeat") / "starter"
    content = {
        name: source for name, source in _walk(starter, "") if not name.startswith("__pycache__/")
    }
    try:
        taken = [name for name in content if os.path.lexists(folder / name)]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(folder, error)
    if taken:
        more = f" and {len(taken) - _MOST_NAMED} more" if len(taken) > _MOST_NAMED else ""
        typer.echo(
            f"{folder} has {', '.join(taken[:_MOST_NAMED])}{more} already, and nothing is replaced. "
            "Name another directory: offbeat init DIRECTORY",
            err=True,
        )
        raise typer.Exit(REFUSED)
    try:
        for name, source in content.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(source.read_bytes())
    except OSError as error:
        _refuse(folder, error)
    typer.echo(_next_steps(folder, len(content)))


def _refuse(folder: Path, error: OSError) -> NoReturn:
    typer.echo(
        f"{folder} cannot be written: {error.strerror}: {error.filename}. "
        "Name another directory: offbeat init DIRECTORY",
        err=True,
    )
    raise typer.Exit(REFUSED) from error


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = list[tuple[str, Traversable]]()
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{prefix}{_RENAMED.get(each.name, each.name)}"
        found += _walk(each, f"{name}/") if each.is_dir() else [(name, each)]
    return found


def _next_steps(folder: Path, written: int) -> str:
    start = [] if folder.resolve() == Path.cwd() else [f"  cd {shlex.quote(str(folder))}"]
    return "\n".join(
        [
            f"{folder}: {written} files",
            "",
            *start,
            "  offbeat check recipe.yaml       model, prompts, reward, this machine",
            "  offbeat train recipe.yaml       a minute; writes runs/starter",
            "  offbeat report runs/starter     one HTML page of the run",
        ]
    )
