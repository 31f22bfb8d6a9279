"""Parts of a trainer from plug-ins, for the models and the rules of a recipe.

The models of a recipe import this module and load plug-ins. So importing it neither imports a model
nor searches for plug-ins.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pydantic import Field

from offbeat.config.base import Config, with_fields
from offbeat.config.problems import Clash
from offbeat.doors import find_plugins

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig

C = TypeVar("C", bound=Config)


class _TrainerPart(Protocol):
    key: str
    section: type[Config] | None
    doc: str
    backend: str | None
    freezes_model: bool
    is_fixed: bool
    has_common_name: bool

    def is_used(self, trainer: Config) -> bool: ...
    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]: ...
    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]: ...


def with_parts(core: type[C], backend: str | None = None) -> type[C]:
    """Return a section with optional sections for the trainer parts of this package's plug-ins.

    Args:
        core: The section without parts.
        backend: Add only parts of this backend. None: add parts for every backend.
    """
    fields: dict[str, Any] = {
        part.key: (part.section | None, Field(default=None, description=part.doc))
        for part in _parts().values()
        if part.section is not None and part.backend == backend
    }
    return with_fields(core, fields)


def part_clashes(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that cannot be combined with a part of the trainer, not even in a dry run."""
    for part in _parts().values():
        if part.is_used(config.trainer):
            yield from part.find_clashes(config)


def part_clashes_of_real_runs(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that cannot be combined with a part of the trainer; a dry run has no parts."""
    for part in _parts().values():
        if part.is_used(config.trainer):
            yield from part.find_clashes_of_real_runs(config)


def model_is_frozen(config: "RunConfig") -> bool:
    """Return whether a trainer part freezes the model and trains weights next to it."""
    return any(part.freezes_model and part.is_used(config.trainer) for part in _parts().values())


def sends_additions(config: "RunConfig") -> bool:
    """Return whether a release holds only weights that each engine adds to the model."""
    return model_is_frozen(config) and config.sync.adapter == "separate"


def keys_of_one_backend() -> list[str]:
    """Return the keys of parts that only one backend has."""
    return [
        f"trainer.{part.key}"
        for part in _parts().values()
        if part.section is not None and part.backend is not None
    ]


def list_fixed_keys() -> list[str]:
    """Return the keys of parts that cannot change when a run resumes."""
    return [f"trainer.{part.key}" for part in _parts().values() if part.is_fixed]


def freezing_keys() -> list[str]:
    """Return the keys of parts that freeze the model and train weights next to it."""
    return [f"trainer.{part.key}" for part in _parts().values() if part.freezes_model]


def common_keys() -> list[str]:
    """Return the keys of parts with names that other libraries also use."""
    return [f"trainer.{part.key}" for part in _parts().values() if part.has_common_name]


def has_part(key: str) -> bool:
    """Return whether a part with this key of section ``trainer`` exists."""
    return any(part.key == key for part in _parts().values())


def _parts() -> dict[str, _TrainerPart]:
    return cast("dict[str, _TrainerPart]", find_plugins("trainer_part"))
