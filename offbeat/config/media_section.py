"""The section of ``environment`` that a plug-in of media brings, for the models and rules of a recipe.

The models of a recipe import this module and load plug-ins: so it imports no model, and looks for no
plug-in when it is imported.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pydantic import Field

from offbeat.config.base import Config, with_fields
from offbeat.config.problems import Clash
from offbeat.doors import plugins_of

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig

C = TypeVar("C", bound=Config)


class MediaLimits(Protocol):
    """The section of media: limits of a prompt."""

    @property
    def max_bytes(self) -> int:
        """Return the most bytes of the media of a prompt."""
        ...


class _MediaPlugin(Protocol):
    key: str
    section: type[Config]
    doc: str

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]: ...


def with_media(core: type[C]) -> type[C]:
    """Return section ``environment`` with the sections of the plug-ins of media."""
    fields: dict[str, Any] = {
        plugin.key: (plugin.section | None, Field(default=None, description=plugin.doc))
        for plugin in _plugins()
    }
    return with_fields(core, fields)


def find_media_limits(environment: Config) -> MediaLimits | None:
    """Return the limits of media in prompts, or None if prompts have none."""
    given = (getattr(environment, plugin.key) for plugin in _plugins())
    return next((section for section in given if section is not None), None)


def media_clashes(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that do not go together with media in prompts."""
    for plugin in _plugins():
        yield from plugin.find_clashes(config)


def _plugins() -> list[_MediaPlugin]:
    return [cast("_MediaPlugin", plugin) for plugin in plugins_of("media").values()]
