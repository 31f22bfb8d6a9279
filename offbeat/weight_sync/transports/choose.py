"""Creates the sender of ``sync.transport``; imports only the chosen one."""

from collections.abc import Callable

from offbeat.config.sections.sync import SyncConfig
from offbeat.weight_sync.transport import Sender, Source
from offbeat.weight_sync.transports.object_store import ObjectStoreSender

_MIB = 2**20


def make_sender(
    config: SyncConfig, source: Source, host: Callable[[], str], incarnation: str
) -> Sender:
    """Create the sender of a trainer's rank 0.

    Args:
        config: Transport, and its limits.
        source: Weights to send.
        host: Returns the address at which other machines reach this one; called only if needed.
        incarnation: Incarnation of this process.
    """
    if config.transport == "object_store":
        return ObjectStoreSender(source)
    from offbeat.weight_sync.transports.gloo_sender import GlooSender  # noqa: PLC0415
    from offbeat.weight_sync.transports.messages import TransferTimeouts  # noqa: PLC0415 -- see above

    timeouts = TransferTimeouts(config.slowest_mib_s * _MIB, config.slack_s)
    return GlooSender(source, host=host(), incarnation=incarnation, timeouts=timeouts)
