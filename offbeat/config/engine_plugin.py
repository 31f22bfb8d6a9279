"""Interface of a kind of engine that a plug-in brings, named by ``generator.backend``.

Plug-ins import this module, and the models of a recipe load plug-ins: so it imports no model, and
looks for no plug-in when it is imported.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from offbeat.config.problems import Clash
from offbeat.doors import find_plugin, plugins_of
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.generator import PluginGeneratorConfig

CORE_ENGINES: Final = ("embedded", "stub", "none")
"""Values of ``generator.backend`` that the core has."""


class EnginePlugin(ABC):
    """Brings the section of a recipe, the rules, the findings and the actor of one kind of engine.

    Each ``config`` that a method gets has the plug-in's ``section`` as its section ``generator``.
    """

    section: type["PluginGeneratorConfig"]
    """Model of section ``generator``. Its field ``backend`` is a ``Literal`` of the name."""

    needs_ray_because: str = "its engines are actors of Ray"
    """Reason why a run in one process cannot have these engines; empty: it can."""

    variable_prefixes: Sequence[str] = ()
    """Prefixes of environment variables that the engines read: their actors get them."""

    @abstractmethod
    def server_class(self) -> type[Any]:
        """Return the class of an engine's server, an ``EngineServer`` that is made from its spec.

        A process of Ray has one engine. Where a run in one process can have these engines, the class
        takes ``steps_in``, an executor of one thread for the engine, and ``cpu_clock``, as
        ``EmbeddedEngineServer`` does.
        """

    def actor_class(self) -> type[Any] | None:
        """Return the class of an engine's Ray actor; None: it is made from the server's class."""
        return None

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together."""
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
        """Yield findings about the model, whose files are complete."""
        del config
        yield from ()


def known_engines() -> dict[str, EnginePlugin]:
    """Return the kinds of engines that plug-ins of this package bring, by name."""
    return cast("dict[str, EnginePlugin]", plugins_of("engine"))


def find_engine(name: str) -> EnginePlugin | None:
    """Return the plug-in of a kind of engine, or None if the core has the kind.

    Raises:
        PluginUnusable: No package brings it, or it cannot be used.
    """
    if name in CORE_ENGINES:
        return None
    return cast("EnginePlugin", find_plugin("engine", name))


def suggest_engine(*others: str) -> str:
    """Return values of ``generator.backend`` to use instead, such as ``embedded or vllm``."""
    return " or ".join([*others, *known_engines()])
