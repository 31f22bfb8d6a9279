"""Asks the plug-ins that section ``sync`` of a recipe needs for settings that do not go together."""

from collections.abc import Iterator
from typing import Protocol, cast

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.doors import PluginUnusable, find_only, find_plugin


class _DeltaPlugin(Protocol):
    def find_clashes(self, config: RunConfig) -> Iterator[Clash]: ...


class _WireFormat(Protocol):
    def find_clashes(self, config: RunConfig) -> Iterator[Clash]: ...


class _TransportPlugin(Protocol):
    def find_clashes(self, config: RunConfig) -> Iterator[Clash]: ...
    def find_clashes_of_real_run(self, config: RunConfig) -> Iterator[Clash]: ...


def sync_plugin_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield keys whose plug-in is not there, or cannot be imported."""
    if config.sync.delta:
        try:
            find_only("release_form")
        except PluginUnusable as unusable:
            message = f"sync.delta=true: {unusable.subject}: {unusable.problem}"
            yield Clash(("sync.delta",), message, f"Leave sync.delta out. {unusable.fix}.")


def delta_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield releases that have no delta."""
    if config.sync.delta and not any(sync_plugin_clashes(config)):
        plugin = cast("_DeltaPlugin", find_only("release_form"))
        yield from plugin.find_clashes(config)


def quantize_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that do not go together with the format of quantized releases."""
    if config.sync.quantize is not None:
        plugin = cast("_WireFormat", find_plugin("wire_format", config.sync.quantize))
        yield from plugin.find_clashes(config)


def transport_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that do not go together with the transport, in a dry run too."""
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
