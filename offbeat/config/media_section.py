"""Section of ``environment`` from a media plug-in, for the models and rules of a recipe.

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


class MediaLimits(Protocol):
    """The section of media: limits of a prompt."""

    @property
    def max_bytes(self) -> int:
        """Return the maximum number of media bytes of a prompt."""
        ...


class _MediaPlugin(Protocol):
    key: str
    section: type[Config]
    doc: str

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]: ...


def with_media(core: type[C]) -> type[C]:
    """Return section ``environment`` with the sections of media plug-ins."""
    fields: dict[str, Any] = {
        plugin.key: (plugin.section | None, Field(default=None, description=plugin.doc))
        for plugin in _plugins()
    }
    return with_fields(core, fields)


def find_media_limits(environment: Config) -> MediaLimits | None:
    """Return the limits of media in prompts, or None if prompts have no media."""
    given = (getattr(environment, plugin.key) for plugin in _plugins())
    return next((section for section in given if section is not None), None)


def media_clashes(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that cannot be combined with media in prompts."""
    for plugin in _plugins():
        yield from plugin.find_clashes(config)


def _plugins() -> list[_MediaPlugin]:
    return [cast("_MediaPlugin", plugin) for plugin in find_plugins("media").values()]
