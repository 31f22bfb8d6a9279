"""Finds backends of the trainer by name, in the core and in plug-ins, for the rules of a recipe.

The models of a recipe import this module and load plug-ins. So importing it neither imports a model
nor searches for plug-ins.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol, cast

from offbeat.config.problems import Clash
from offbeat.doors import find_plugin, find_plugins

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.trainer_base import ModelTrainerConfig

CORE_BACKENDS: Final = ("torch", "stub")
"""Values of ``trainer.backend`` that need no plug-in."""


class _TrainerPlugin(Protocol):
    section: "type[ModelTrainerConfig]"
    why_not_local: str

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]: ...


def trainer_sections() -> "tuple[type[ModelTrainerConfig], ...]":
    """Return the models of section ``trainer`` from plug-ins of this package."""
    brought = cast("dict[str, _TrainerPlugin]", find_plugins("trainer"))
    return tuple(plugin.section for plugin in brought.values())


def find_trainer_rules(backend: str) -> _TrainerPlugin | None:
    """Return the plug-in of a backend, or None if the core has the backend.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    if backend in CORE_BACKENDS:
        return None
    return cast("_TrainerPlugin", find_plugin("trainer", backend))
