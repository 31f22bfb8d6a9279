"""``offbeat simulate``: runs the recipe's controller in the simulator."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from offbeat.config.loader import LoadedRecipe
from offbeat.simulation.cli import simulate


def simulate_recipe(
    loaded: LoadedRecipe,
    recipe: Path,
    overrides: Sequence[str],
    seeds: int,
    seed: int | None,
    base: int | None,
    faults: str,
    schedule: Path | None,
) -> int:
    """Run a campaign or one seed. Exit code 0: no violation, 1: a violation, 2: unknown profile."""
    return simulate(
        loaded.config,
        recipe=(str(recipe), *overrides),
        seeds=seeds,
        seed=seed,
        base=base,
        faults=faults,
        schedule=schedule,
        write=partial(typer.echo, nl=False),
    )
