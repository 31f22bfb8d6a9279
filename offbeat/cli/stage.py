"""Runs ``offbeat stage`` and chooses its exit code."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from offbeat.cli.arguments import StagedPart
from offbeat.cli.recipes import read_or_exit
from offbeat.config.run import RunConfig
from offbeat.messages.exit_codes import FAILED, FINISHED, REFUSED
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable_lines
from offbeat.staging.hub_model import FORM, HubModel, hub_model
from offbeat.staging.manifest import NothingToStage, SourceStalled
from offbeat.staging.outcome import table_of
from offbeat.staging.source import model_names

_RECIPES = (".yaml", ".yml")


def stage_exit_code(
    what: str,
    overrides: Sequence[str],
    target: Path,
    stall_timeout_s: float,
    part: StagedPart = StagedPart.MODEL,
) -> int:
    """Stage a model, or another part of a recipe, and print a row per node.

    Returns:
        0 if every node has the model, 1 if one lacks it, 2 if nothing was copied.
    """
    try:
        model, runtime_env = _model_of(what, overrides, part)
        _check_target(target)
        if isinstance(model, Path):
            model_names(model)
    except NothingToStage as error:
        typer.echo(printable_lines(str(error)), err=True)
        return REFUSED

    from offbeat.launch.process_environment import set_environment

    set_environment(runtime_env)
    # Ray reads its variables when it is imported.
    from offbeat.launch.stage import StagingRequest, stage

    try:
        outcomes = stage(StagingRequest(model, target, stall_timeout_s, runtime_env), _say)
    except SourceStalled as error:
        refuse_at_once(error)
    except OffbeatError as error:
        typer.echo(printable_lines(str(error)), err=True)
        return REFUSED
    typer.echo(printable_lines(table_of(outcomes)), nl=False)
    if not all(outcome.is_whole for outcome in outcomes.values()):
        return FAILED
    typer.echo(f"Every node has the model. In a recipe: {part.key}={target}")
    return FINISHED


def _say(line: str) -> None:
    typer.echo(printable_lines(line))


def refuse_at_once(error: SourceStalled) -> NoReturn:
    """Print the error and end the process, whose threads may read or download for ever.

    Python waits at its end for the threads of a pool, which the client of the hub downloads in.
    """
    typer.echo(printable_lines(str(error)), err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(REFUSED)


def _check_target(target: Path) -> None:
    if not target.is_absolute():
        fix = "Write it from / on: each node has its own working directory"
        raise NothingToStage(f"--to {target}", "it is relative", fix)


def _model_of(
    what: str, overrides: Sequence[str], part: StagedPart
) -> tuple[Path | HubModel, dict[str, str]]:
    """Return a part of a recipe, a directory or a name on the hub, and variables of processes."""
    path = Path(what)
    if path.suffix in _RECIPES:
        config = read_or_exit(path, overrides).config
        return _part_of(config, part, what), dict(config.runtime.env)
    if overrides:
        fix = "Name a recipe, or leave them out"
        raise NothingToStage(what, "settings go with a recipe, and this is none", fix)
    if part is not StagedPart.MODEL:
        fix = "Name a recipe, or the directory itself and leave --part out"
        raise NothingToStage(what, "--part goes with a recipe, and this is none", fix)
    if path.is_dir():
        return path.absolute(), {}
    named = hub_model(what)
    if named is None:
        fix = f"Name a recipe, a model directory, or a model of the hub as {FORM}"
        raise NothingToStage(what, "there is no such directory", fix)
    return named, {}


def _part_of(config: RunConfig, part: StagedPart, recipe: str) -> Path:
    match part:
        case StagedPart.MODEL:
            path = config.model.path
        case StagedPart.WEIGHTS:
            path = config.model.weights
        case StagedPart.TEACHER:
            path = config.algorithm.loss.teacher_path
    if path is None:
        raise NothingToStage(recipe, f"it sets no {part.key}", "Set it, or leave --part out")
    return Path(path).absolute()
