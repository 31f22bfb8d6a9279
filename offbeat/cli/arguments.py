"""Arguments that several commands have."""

import enum
from pathlib import Path
from typing import Annotated, Final

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


class StagedPart(enum.StrEnum):
    """Directory of a recipe that is staged."""

    MODEL = "model"
    WEIGHTS = "weights"
    TEACHER = "teacher"

    @property
    def key(self) -> str:
        """Return the key of a recipe that names it."""
        return _KEYS[self]


_KEYS: Final = {
    StagedPart.MODEL: "model.path",
    StagedPart.WEIGHTS: "model.weights",
    StagedPart.TEACHER: "algorithm.loss.teacher",
}
