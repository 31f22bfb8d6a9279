"""Check of how weights reach the engines."""

from collections.abc import Iterator, Mapping

from offbeat.config.run import RunConfig
from offbeat.messages.finding import Finding
from offbeat.weight_sync.delta_plugin import find_delta
from offbeat.weight_sync.transport_plugin import find_transport_of


def check_weight_sync(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what deltas and the transport say about a recipe on this machine."""
    if config.sync.delta and config.generator.has_engines:
        yield from find_delta().check(config)
    transport = find_transport_of(config.sync)
    if transport is not None:
        yield from transport.check(config, environ)
