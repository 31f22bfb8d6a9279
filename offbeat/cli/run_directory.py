"""The directory of one run: chosen, made, never shared with another run."""

import itertools
import os
from pathlib import Path
from typing import Any

import yaml

from offbeat.config.dump import to_yaml
from offbeat.config.run import RunConfig
from offbeat.messages.failures import OffbeatError

CONFIG = "config.yaml"


class RunDirUnusable(OffbeatError):
    """A run cannot write where it was told to."""

    def __init__(self, path: str, problem: str, fix: str) -> None:
        super().__init__(path, problem, fix)
        self.path, self.problem, self.fix = path, problem, fix

    def __str__(self) -> str:
        return f"run directory {self.path}: {self.problem}. {self.fix}"


def make_run_dir(config: RunConfig, asked: Path | None) -> Path:
    """Make the run's directory and write the resolved config into it.

    ``asked`` must be free. The recipe's own ``run_dir`` gets the first free number behind it, so
    that a recipe can be run again as it stands.

    Raises:
        RunDirUnusable: It holds a run already, or cannot be written.
    """
    wanted = Path(str(asked or config.run_dir).replace("{name}", config.name)).absolute()
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([wanted], () if asked else numbered)
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            # The config is the mark of a taken directory; creating it settles a race of two runs.
            with (candidate / CONFIG).open("x", encoding="utf-8") as file:
                file.write(to_yaml(config, os.environ))
        except FileExistsError:
            continue
        except OSError as error:
            fix = "Name another one with --run-dir"
            raise RunDirUnusable(str(candidate), error.strerror or str(error), fix) from error
        return candidate
    raise RunDirUnusable(str(wanted), "it holds another run", "Name another one with --run-dir")


def reopen_run_dir(config: RunConfig, run_dir: Path) -> Path:
    """The directory of a run that is to go on, checked against the recipe it goes on with.

    Raises:
        RunDirUnusable: It holds no run, or one that this recipe cannot go on with: the message names
            each difference.
    """
    directory = run_dir.absolute()
    if not (directory / CONFIG).exists() or not (directory / "journal").is_dir():
        fix = "Name the directory that an earlier run wrote"
        raise RunDirUnusable(str(directory), "it holds no run to resume", fix)
    before = yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8"))
    now = yaml.safe_load(to_yaml(config, os.environ))
    changed = [
        f"{key} is {_at(now, key)!r}, the run has {_at(before, key)!r}"
        for key in _FIXED
        if _at(before, key) != _at(now, key)
    ]
    if changed:
        fix = "Leave these as they were (offbeat train --resume RUN alone does), or start a new run"
        raise RunDirUnusable(str(directory), "; ".join(changed), fix)
    (directory / CONFIG).write_text(to_yaml(config, os.environ), encoding="utf-8")
    return directory


_FIXED = (
    "seed",
    "groups_per_step",
    "samples_per_group",
    "sampler.name",
    "model",
    "data",
    "environment.name",
    "environment.target",
    "environment.options",
    "trainer.backend",
)
"""What the books of a run are made of: with another value its ordinals or steps mean other things."""


def _at(tree: Any, key: str) -> object:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
