"""``offbeat simulate``: reads its recipe, then imports the simulator."""

from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from offbeat.launch.commands.arguments import PLAN, OverridesArgument, RecipeArgument, RecipeCommand

COMMANDS: Final = typer.Typer(rich_markup_mode=None)


@COMMANDS.command(cls=RecipeCommand, rich_help_panel=PLAN)
def simulate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Episodes to run.")] = 100,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Run only this episode, in full detail.")
    ] = None,
    base: Annotated[
        int | None, typer.Option("--base", help="First seed; default: random, and printed.")
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            help="Faults: none, engines, trainer, machines, controller, network, data, all.",
        ),
    ] = "all",
    schedule: Annotated[
        Path | None,
        typer.Option("--schedule", help="JSON file of faults to play, instead of random ones."),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print failed episodes, outcomes and counts of each fault."
        ),
    ] = False,
) -> None:
    """Test the controller in a deterministic simulator. Audits every episode."""
    from offbeat.launch.commands.recipes import read_or_exit

    loaded = read_or_exit(recipe, overrides, dry_run=True)

    from offbeat.plugins.simulation.cli import simulate as simulated

    exit_code = simulated(
        loaded.config,
        recipe=(str(recipe), *(overrides or ())),
        seeds=seeds,
        seed=seed,
        base=base,
        faults=faults,
        schedule=schedule,
        verbose=verbose,
        write=partial(typer.echo, nl=False),
        report_progress=partial(typer.echo, nl=False, err=True),
    )
    raise SystemExit(exit_code)
