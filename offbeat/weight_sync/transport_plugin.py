"""Interface of a plug-in that transports releases from trainer ranks to engines.

The controller passes the handles of a release from the sender to the engines. A handle that is a
``ReleaseHandle`` names its transport. The engine gets a receiver from this transport. Recipe models
load plug-ins, and plug-ins import this module. So this module must import neither these models nor
array libraries.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from offbeat.config.problems import Clash
from offbeat.config.sections.sync_base import BaseSyncConfig
from offbeat.doors import find_plugin
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.sync import SyncConfig
    from offbeat.weight_sync.buckets import BucketRoute
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.manifest import Manifest
    from offbeat.weight_sync.transport import ReleaseHandle, Sender, WeightSource


class Received(Protocol):
    """Buckets that a receiver has verified."""

    @property
    def buckets(self) -> "tuple[BucketMemory, ...]":
        """Return the buckets in the order in which they were requested."""
        ...


class ReleaseReceiver(Protocol):
    """Receiving end of a transport, in an engine or in one of its workers."""

    def receive(
        self,
        route: Any,  # noqa: ANN401 -- the handle of this transport
        epoch: int,
        manifest: "Manifest",
        cancelled: threading.Event | None = None,
        *,
        needed: Sequence[int] | None = None,
        release: "Manifest | None" = None,
    ) -> Received:
        """Receive and verify buckets of a release. Blocks.

        Args:
            route: Handle of the release.
            epoch: Epoch of the transfer.
            manifest: Manifest of the whole release, or of its delta.
            cancelled: Event that stops the call at the next bucket.
            needed: Buckets to receive, or None for the plan's buckets of this receiver.
            release: Manifest whose tensor names are used in errors. None means ``manifest``.

        Raises:
            TransferFailed: No holder of a bucket could send it, or ``cancelled`` was set.
            SenderGone: All holders of a bucket have ended, or they now send a different release.
        """
        ...

    def check_on_host(self, route: Any, epoch: int) -> None:  # noqa: ANN401 -- as above
        """Check that a release can be received into main memory.

        Raises:
            TransferRefused: It cannot, because the ranks send from their devices.
        """
        ...


class TransportPlugin(ABC):
    """Creates the two ends of one ``sync.transport``, and defines the transport's keys."""

    section: type[BaseSyncConfig]
    """Section ``sync`` of a recipe with this transport."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that clash, even in a dry run."""
        del config
        yield from ()

    def find_clashes_of_real_run(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that clash, unless stubs replace ranks and engines."""
        del config
        yield from ()

    def for_dry_run(self, section: BaseSyncConfig) -> Mapping[str, Any]:
        """Return the keys of the section that must change for stubs, with their values."""
        del section
        return {}

    def check(self, config: "RunConfig", environ: Mapping[str, str]) -> Iterator[Finding]:
        """Yield findings for ``offbeat check``."""
        del config, environ
        yield from ()

    def check_machines(self, config: "RunConfig", gpu_machines: Sequence[str]) -> None:
        """Check that the transport works between the machines of a cluster.

        Args:
            config: The run.
            gpu_machines: Addresses of all machines with GPUs. Ray may start an actor on any of
                them.

        Raises:
            FixableError: An engine may be on a machine that the trainer's weights cannot reach.
        """
        del config, gpu_machines

    @abstractmethod
    def make_sender(
        self,
        section: BaseSyncConfig,
        source: "WeightSource",
        host: str,
        incarnation: str,
        peers: Any,  # noqa: ANN401 -- Peers of a room above
        device: str,
    ) -> "Sender":
        """Create the sender of a rank. All ranks must call this together.

        Args:
            section: Section ``sync`` of the recipe.
            source: Weights of the rank. This is a ``ShardSource`` if each rank sends.
            host: Address of this machine for other machines.
            incarnation: Incarnation of this process.
            peers: All ranks.
            device: Device of this rank, as torch names it.
        """

    @abstractmethod
    def make_receiver(self, member: str, rank: int = 0, device: str = "cpu") -> ReleaseReceiver:
        """Create the receiving end of an engine, or of one of its workers.

        Args:
            member: Name of the engine, or of its worker.
            rank: Number of this receiver in the plan.
            device: Device that receives the data.
        """

    @abstractmethod
    def decode_senders(self, senders: bytes, buckets: "tuple[BucketRoute, ...]") -> "ReleaseHandle":
        """Return a release's handle, made from its buckets and what ``encode_senders`` returned."""


def find_transport(name: str) -> TransportPlugin:
    """Return the plug-in of a transport that is not in the core.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    return cast("TransportPlugin", find_plugin("transport", name))


def find_transport_plugin(sync: "SyncConfig") -> TransportPlugin | None:
    """Return the plug-in of a recipe's transport, or None if the core has the transport.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    return None if sync.transport == "object_store" else find_transport(sync.transport)
