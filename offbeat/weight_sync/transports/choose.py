"""Creates the sender of ``sync.transport``; imports only the chosen one."""

from collections.abc import Callable

from offbeat.config.sections.sync import GlooSyncConfig, ObjectStoreSyncConfig, ReshardSyncConfig
from offbeat.weight_sync.transport import Sender, Source
from offbeat.weight_sync.transports.messages import TransferTimeouts
from offbeat.weight_sync.transports.object_store import ObjectStoreSender

_MIB = 2**20


def make_sender(
    config: ObjectStoreSyncConfig | GlooSyncConfig,
    source: Source,
    host: Callable[[], str],
    incarnation: str,
) -> Sender:
    """Create the sender of a trainer's rank 0, which sends the weights of all ranks.

    Args:
        config: Transport, and its limits.
        source: Weights to send.
        host: Returns the address at which other machines reach this one; called only if needed.
        incarnation: Incarnation of this process.
    """
    if config.transport == "object_store":
        return ObjectStoreSender(source, delta=config.delta)
    from offbeat.weight_sync.transports.gloo_sender import GlooSender  # noqa: PLC0415

    timeouts = timeouts_of(config)
    return GlooSender(
        source, host=host(), incarnation=incarnation, timeouts=timeouts, delta=config.delta
    )


def timeouts_of(config: GlooSyncConfig | ReshardSyncConfig) -> TransferTimeouts:
    """Return the limits of a transport over TCP."""
    return TransferTimeouts(config.slowest_mib_s * _MIB, config.slack_s)
