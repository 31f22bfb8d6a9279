"""Reads the recipe of a command, and prints its configuration or problems."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from offbeat.config.hub_path import is_on_hub
from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.yaml_text import to_yaml
from offbeat.launch.commands.arguments import refuse
from offbeat.launch.process_environment import set_environment
from offbeat.messages.exit_codes import REFUSED
from offbeat.messages.failures import OffbeatError


def read_or_exit(
    recipe: Path, overrides: Sequence[str] | None, *, dry_run: bool = False
) -> LoadedRecipe:
    """Read a recipe. On errors, report all problems on standard error and exit with code 2."""
    try:
        return load_recipe(recipe, overrides or (), dry_run=dry_run)
    except ConfigError as error:
        typer.echo(_report(error), err=True)
        raise typer.Exit(REFUSED) from None


def read_with_model(recipe: Path, overrides: Sequence[str] | None) -> LoadedRecipe:
    """Read a recipe as ``read_or_exit`` does, and download its model if it is on the hub."""
    loaded = read_or_exit(recipe, overrides)
    if not is_on_hub(loaded.config.model.path):
        return loaded
    set_environment(loaded.config.runtime.env)  # before the client of the hub is imported
    from offbeat.launch.hub_model import with_local_model

    try:
        config = with_local_model(loaded.config, partial(typer.echo, err=True))
    except OffbeatError as error:
        refuse(error)
    return replace(loaded, config=config)


def _report(error: ConfigError) -> str:
    """Format the error with a red heading. ``typer.echo`` removes colours without a terminal."""
    head, _, rest = str(error).partition("\n")
    return f"{typer.style(head, fg=typer.colors.RED, bold=True)}\n{rest}"


def show(loaded: LoadedRecipe, *, origins: bool) -> str:
    """Format the whole configuration as YAML without secrets, or one line per given key."""
    if not origins:
        return to_yaml(loaded.config, os.environ)
    lines = [f"{key}: {location}" for key, location in loaded.origins.items()]
    lines += [f"{key}: not used, another choice by name was made" for key in loaded.dropped]
    return "".join(f"{line}\n" for line in lines)
