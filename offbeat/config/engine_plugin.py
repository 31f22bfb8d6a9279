"""Interface of a kind of engine that a plug-in adds, selected by ``generator.backend``.

Plug-ins import this module, and the models of a recipe load plug-ins. So importing it neither
imports a model nor searches for plug-ins.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from offbeat.config.problems import Clash
from offbeat.doors import find_plugin, find_plugins
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.generator import PluginGeneratorConfig

CORE_ENGINES: Final = ("embedded", "stub", "none")
"""Values of ``generator.backend`` that the core has."""


class EnginePlugin(ABC):
    """Provides a recipe section, rules, findings and an actor for one kind of engine.

    Each ``config`` passed to a method has the plug-in's ``section`` as its section ``generator``.
    """

    section: type["PluginGeneratorConfig"]
    """Model of section ``generator``. Its field ``backend`` is a ``Literal`` of the name."""

    needs_ray_because: str = "its engines are actors of Ray"
    """Reason why a run in one process cannot use these engines. Empty if it can."""

    variable_prefixes: Sequence[str] = ()
    """Prefixes of environment variables that the engines read. Their actors receive them."""

    @abstractmethod
    def server_class(self) -> type[Any]:
        """Return the class of an engine's server: an ``EngineServer``, created from its spec.

        A process of Ray has one engine. If a run in one process can use these engines, the class
        accepts ``steps_in``, an executor of one thread for the engine, and ``cpu_clock``, as
        ``EmbeddedEngineServer`` does.
        """

    def actor_class(self) -> type[Any] | None:
        """Return the class of an engine's Ray actor, or None to derive it from the server class."""
        return None

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that cannot be combined."""
        del config
        yield from ()

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings for ``offbeat check``, without the model."""
        del config
        yield from ()

    def check_weight_sync(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings about releases that trainer ranks send by region."""
        del config
        yield from ()

    def check_model(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings about the model, after all its files are present."""
        del config
        yield from ()


def known_engines() -> dict[str, EnginePlugin]:
    """Return the kinds of engines from plug-ins of this package, by name."""
    return cast("dict[str, EnginePlugin]", find_plugins("engine"))


def find_engine(name: str) -> EnginePlugin | None:
    """Return the plug-in of a kind of engine, or None if the core has the kind.

    Raises:
        PluginUnusable: No package provides it, or it cannot be used.
    """
    if name in CORE_ENGINES:
        return None
    return cast("EnginePlugin", find_plugin("engine", name))


def suggest_engine(*others: str) -> str:
    """Return values of ``generator.backend`` to use instead, such as ``embedded or vllm``."""
    return " or ".join([*others, *known_engines()])
