"""Checks the sections of plug-ins from other packages, which are no part of the models."""

from collections.abc import Iterator
from typing import Protocol, cast

from pydantic import ValidationError

from offbeat.config.base import Config
from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.doors import PluginUnusable, find_plugin


class _HasSection(Protocol):
    @property
    def section(self) -> type[Config]: ...


def section_of_plugin(name: str) -> type[Config]:
    """Return the model of the section ``plugins.NAME``.

    Raises:
        PluginUnusable: There is no such plug-in, or its import fails.
    """
    return cast("_HasSection", find_plugin("tracker", name)).section


def plugin_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield sections whose plug-in cannot be used, and values that it refuses."""
    for name, options in config.plugins.items():
        section = f"plugins.{name}"
        if name in RunConfig.model_fields:
            fix = f"Write them in section {name}"
            yield Clash((section,), f"the keys of {name} have a section of their own", f"{fix}.")
            continue
        try:
            section_of_plugin(name).model_validate(options)
        except PluginUnusable as unusable:
            yield Clash((section,), f"{unusable.subject}: {unusable.problem}", f"{unusable.fix}.")
        except ValidationError as refused:
            for each in refused.errors(include_url=False):
                key = ".".join([section, *map(str, each["loc"])])
                known = ", ".join(section_of_plugin(name).model_fields)
                yield Clash((section,), f"{key}: {each['msg']}", f"Its keys: {known}.")
