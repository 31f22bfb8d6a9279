"""Parts of a trainer that plug-ins bring, for the models and the rules of a recipe.

The models of a recipe import this module and load plug-ins: so it imports no model, and looks for no
plug-in when it is imported.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pydantic import Field, create_model

from offbeat.config.base import Config
from offbeat.config.clash import Clash
from offbeat.doors import plugins_of

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig

C = TypeVar("C", bound=Config)


class _TrainerPart(Protocol):
    key: str
    section: type[Config]
    doc: str

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]: ...
    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]: ...


def with_parts(core: type[C]) -> type[C]:
    """Return a section with the optional sections of the parts that plug-ins of this package bring."""
    fields: dict[str, Any] = {
        part.key: (part.section | None, Field(default=None, description=part.doc))
        for part in _parts().values()
    }
    return create_model(
        core.__name__, __base__=core, __module__=core.__module__, __doc__=core.__doc__, **fields
    )


def part_clashes(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that do not go together with a part of the trainer, in a dry run neither."""
    for part in _parts().values():
        if is_set(config.trainer, part.key):
            yield from part.find_clashes(config)


def part_clashes_of_real_runs(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that do not go together with a part of the trainer; a dry run has no parts."""
    for part in _parts().values():
        if is_set(config.trainer, part.key):
            yield from part.find_clashes_of_real_runs(config)


def is_set(trainer: Config, key: str) -> bool:
    """Return whether the section of a trainer has a part."""
    return getattr(trainer, key, None) is not None


def _parts() -> dict[str, _TrainerPart]:
    return cast("dict[str, _TrainerPart]", plugins_of("trainer_part"))
