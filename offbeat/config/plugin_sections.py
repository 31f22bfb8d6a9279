"""Checks the sections of plug-ins from other packages, which the models do not contain.

Also asks the plug-ins of section ``sync`` for settings that cannot be combined.
"""

from collections.abc import Iterator
from typing import Protocol, cast

from pydantic import ValidationError

from offbeat.config.base import Config
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.doors import PluginUnusable, find_only, find_plugin


class _HasSection(Protocol):
    @property
    def section(self) -> type[Config]: ...


def section_of_plugin(name: str) -> type[Config]:
    """Return the model of the section ``plugins.NAME``.

    Raises:
        PluginUnusable: The plug-in does not exist, or its import fails.
    """
    return cast("_HasSection", find_plugin("tracker", name)).section


def plugin_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield sections with an unusable plug-in, and values that a plug-in refuses."""
    for name, options in config.plugins.items():
        section = f"plugins.{name}"
        if name in RunConfig.model_fields:
            fix = f"Write them in section {name}"
            yield Clash((section,), f"{name} has a separate section", f"{fix}.")
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


class _DeltaPlugin(Protocol):
    def find_clashes(self, config: RunConfig) -> Iterator[Clash]: ...


class _WireFormat(Protocol):
    def find_clashes(self, config: RunConfig) -> Iterator[Clash]: ...


class _TransportPlugin(Protocol):
    def find_clashes(self, config: RunConfig) -> Iterator[Clash]: ...
    def find_clashes_of_real_run(self, config: RunConfig) -> Iterator[Clash]: ...


def sync_plugin_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield keys with a missing plug-in, or a plug-in that cannot be imported."""
    if config.sync.delta:
        try:
            find_only("release_form")
        except PluginUnusable as unusable:
            message = f"sync.delta=true: {unusable.subject}: {unusable.problem}"
            yield Clash(("sync.delta",), message, f"Leave sync.delta out. {unusable.fix}.")


def delta_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings with which releases can have no delta."""
    if config.sync.delta and not any(sync_plugin_clashes(config)):
        plugin = cast("_DeltaPlugin", find_only("release_form"))
        yield from plugin.find_clashes(config)


def quantize_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that cannot be combined with the format of quantized releases."""
    if config.sync.quantize is not None:
        plugin = cast("_WireFormat", find_plugin("wire_format", config.sync.quantize))
        yield from plugin.find_clashes(config)


def transport_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that cannot be combined with the transport, even in a dry run."""
    for plugin in _transport_plugin(config):
        yield from plugin.find_clashes(config)


def transport_clashes_of_real_run(config: RunConfig) -> Iterator[Clash]:
    """Yield releases and devices that the transport cannot send."""
    for plugin in _transport_plugin(config):
        yield from plugin.find_clashes_of_real_run(config)


def _transport_plugin(config: RunConfig) -> Iterator[_TransportPlugin]:
    """Yield the plug-in of the transport, if it has one."""
    if config.sync.transport != "object_store":
        yield cast("_TransportPlugin", find_plugin("transport", config.sync.transport))
