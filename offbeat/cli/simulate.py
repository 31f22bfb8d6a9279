"""``offbeat simulate``: the recipe's controller, through seeds and faults, without actors."""

from functools import partial
from pathlib import Path

import typer

from offbeat.config.loader import LoadedRecipe
from offbeat.simulation.cli import simulate


def simulate_recipe(
    loaded: LoadedRecipe,
    recipe: Path,
    seeds: int,
    seed: int | None,
    base: int | None,
    faults: str,
    schedule: Path | None,
) -> int:
    """Run it; the exit code: 0 without a violation, 1 with one, 2 for a profile there is not."""
    return simulate(
        loaded.config,
        recipe=str(recipe),
        seeds=seeds,
        seed=seed,
        base=base,
        faults=faults,
        schedule=schedule,
        write=partial(typer.echo, nl=False),
    )
