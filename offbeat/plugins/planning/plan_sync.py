"""Combines the inputs of ``offbeat plan-sync``: a recipe, options, or both."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offbeat.launch.commands.arguments import refuse
from offbeat.launch.commands.recipes import read_with_model
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable_json, printable_lines
from offbeat.plugins.planning.grid_text import parse_grid
from offbeat.plugins.planning.sync_plan import (
    ENGINE_KEYS,
    MIB,
    OPTION_NAMES,
    TRAINER_KEYS,
    NothingToPlan,
    SyncLayouts,
    make_layouts,
    make_plan,
    with_recorded,
)
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.engine_layout import read_layout
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid

_PIECE_BYTES = 64 * MIB


def plan_or_exit(
    recipe: Path | None,
    overrides: Sequence[str] | None,
    model: Path | None,
    senders: str | None,
    receivers: str | None,
    recorded: Path | None,
    per_machine: int,
    *,
    as_json: bool,
) -> str:
    """Return the plan as text or JSON, or end the process with code 2 if no plan is possible."""
    try:
        layouts = _layouts(recipe, overrides, model, senders, receivers, per_machine)
        if recorded is not None:
            if receivers:
                raise NothingToPlan("--recorded gives the receivers: leave --receivers out")
            layouts = with_recorded(layouts, read_layout(recorded))
        _, report = make_plan(layouts)
    except LayoutRefused as refused:
        of_recipe = {
            "senders": {} if senders else TRAINER_KEYS,
            "receivers": {} if receivers else ENGINE_KEYS,
        }
        side = refused.where.partition(",")[0]
        found = refused.name_key({} if recipe is None else of_recipe.get(side, {}))
        refuse(found)
    except OffbeatError as error:
        refuse(error)
    return printable_json(report.to_json()) if as_json else printable_lines(report.to_text())


def _layouts(
    recipe: Path | None,
    overrides: Sequence[str] | None,
    model: Path | None,
    senders: str | None,
    receivers: str | None,
    per_machine: int,
) -> SyncLayouts:
    if recipe is None:
        if model is None or not senders or not receivers:
            raise NothingToPlan(
                "give a RECIPE, or all of --model, --senders and --receivers"
                + _empty(senders, receivers)
            )
        grids = _grid("--senders", senders), _grid("--receivers", receivers)
        return SyncLayouts(
            model, WirePolicy(), *grids, per_machine, _PIECE_BYTES, names=OPTION_NAMES
        )
    found = make_layouts(read_with_model(recipe, overrides).config, per_machine)
    if model is not None:
        found = replace(found, model=model, policy=WirePolicy())
    if senders:
        found = replace(found, senders=_grid("--senders", senders), names=OPTION_NAMES)
    return replace(found, receivers=_grid("--receivers", receivers)) if receivers else found


def _empty(senders: str | None, receivers: str | None) -> str:
    """List the sides given without a size, or return an empty string."""
    empty = [
        option
        for option, sizes in (("--senders", senders), ("--receivers", receivers))
        if sizes == ""
    ]
    return f"; {' and '.join(empty)} without a size: one rank is tensor=1" if empty else ""


def _grid(option: str, text: str) -> ModelGrid:
    """Return the grid of an option. Errors name the option."""
    try:
        return parse_grid(text)
    except LayoutRefused as refused:
        raise refused.of(option) from refused
