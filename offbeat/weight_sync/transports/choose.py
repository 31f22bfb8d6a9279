"""From ``sync.transport`` to the trainer's end; imports only what is chosen."""

from collections.abc import Callable

from offbeat.config.sections.sync import SyncConfig
from offbeat.weight_sync.transport import Sender, Source
from offbeat.weight_sync.transports.object_store import ObjectStoreSender

_MIB = 2**20


def make_sender(config: SyncConfig, source: Source, host: Callable[[], str], life: str) -> Sender:
    """The sender of a trainer's rank 0.

    Args:
        config: Which one, and its limits.
        source: What it sends.
        host: The address that other machines reach this one at; asked only if it is needed.
        life: Names this process.
    """
    if config.transport == "object_store":
        return ObjectStoreSender(source)
    from offbeat.weight_sync.transports.gloo_sender import GlooSender  # noqa: PLC0415
    from offbeat.weight_sync.transports.messages import TransferLimits  # noqa: PLC0415 -- see above

    limits = TransferLimits(config.slowest_mib_s * _MIB, config.slack_s)
    return GlooSender(source, host=host(), life=life, limits=limits)
