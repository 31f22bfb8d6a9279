"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="YAML recipe, as in recipes/quickstart.yaml.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings laid over the recipe: steps=10 sampler.name=in_order.",
    ),
]
