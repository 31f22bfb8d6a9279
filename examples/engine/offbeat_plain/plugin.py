"""Brings ``generator.backend: plain``."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from offbeat.interfaces import Clash, EnginePlugin, PluginGeneratorConfig

if TYPE_CHECKING:
    from offbeat.interfaces import RunConfig


class PlainConfig(PluginGeneratorConfig):
    """Engines without a cache, to compare others with."""

    backend: Literal["plain"] = "plain"
    """Sampling backend."""


class PlainPlugin(EnginePlugin):
    """Names the section and the server of plain engines."""

    section = PlainConfig
    needs_ray_because = ""

    def server_class(self) -> type[Any]:
        """Return the class of an engine's server."""
        from offbeat_plain.server import PlainServer

        return PlainServer

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Refuse filters of the distribution, which the engine lacks."""
        sampling = config.generator.sampling
        unset = {"stop": (), "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, value in unset.items():
            if (given := getattr(sampling, name)) != value:
                key = f"generator.sampling.{name}"
                problem = f"{key}={given}: plain engines sample by temperature alone"
                yield Clash((key, "generator.backend"), problem, f"Leave {key} out.")


PLAIN: Final = PlainPlugin()
