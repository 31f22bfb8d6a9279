"""Defines section ``sync`` of a recipe with ``sync.transport: reshard``."""

from typing import Annotated, Final, Literal

from pydantic import Field

from offbeat.config.sections.sync_base import BaseSyncConfig

SENDERS_AT_ONCE: Final = 4
"""Senders of a reshard that an engine asks at the same time. Their buckets share the engine's
link."""

BUCKETS_IN_FLIGHT: Final = 2
"""Buckets in flight from one sender to one engine. One is checked while the next one arrives."""

BUCKETS_AT_ONCE: Final = SENDERS_AT_ONCE * BUCKETS_IN_FLIGHT


class ReshardSyncConfig(BaseSyncConfig):
    """Send each rank's shards directly; nothing is gathered, and no rank sends the whole model."""

    ranks_send = True

    transport: Literal["reshard"] = "reshard"
    """How weights get from the trainer to the engines."""

    slowest_mib_s: Annotated[float, Field(gt=0)] = 100.0
    """MiB/s below which a link counts as broken. A chunk may take its size divided by this, plus
    `slack_s`. Lower it for slow networks; broken links are then noticed later."""

    slack_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds allowed for each wait for a peer, in addition to the time for the data. Raise it for
    machines that stall; lost engines are then skipped later."""

    wire: Literal["tcp", "cuda_ipc", "nccl"] = "tcp"
    """How buckets are sent. tcp: through main memory, between any machines. cuda_ipc: device memory
    shared with engines on the same GPU. nccl: between devices. cuda_ipc and nccl need one more
    copy, in device memory, of the data sent or received. They have not run on a GPU yet."""

    def sends_regions(self, ranks: int) -> bool:
        """Return whether releases of ``ranks`` trainer ranks are cut into regions of tensors.

        A single rank sends whole tensors over tcp. Over other wires it sends each engine worker
        only the regions that the worker needs.
        """
        return ranks > 1 or self.wire != "tcp"


def find_wire(sync: BaseSyncConfig) -> Literal["tcp", "cuda_ipc", "nccl"]:
    """Return the wire that carries buckets, or tcp for transports without buckets."""
    return sync.wire if isinstance(sync, ReshardSyncConfig) else "tcp"
