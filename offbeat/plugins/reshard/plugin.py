"""Plug-in of the transport ``reshard``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from offbeat.config.base import of_kind
from offbeat.config.problems import Clash
from offbeat.config.sections.sync_base import BaseSyncConfig
from offbeat.messages.finding import Finding
from offbeat.plugins.reshard.section import ReshardSyncConfig, find_wire
from offbeat.weight_sync.transport_plugin import TransportPlugin

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.plugins.reshard.messages import ShardRoute
    from offbeat.plugins.reshard.receiver import ReshardReceiver
    from offbeat.plugins.reshard.sender import ReshardSender
    from offbeat.trainers.ranks.peers import Peers
    from offbeat.weight_sync.buckets import BucketRoute
    from offbeat.weight_sync.transport import WeightSource


class Reshard(TransportPlugin):
    """Sends each rank's regions over TCP, shared device memory or NCCL."""

    section = ReshardSyncConfig

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield deadlines that end before a broken transfer can be repeated."""
        from offbeat.plugins.reshard.checks import deadline_clashes

        yield from deadline_clashes(of_kind(ReshardSyncConfig, config.sync))

    def find_clashes_of_real_run(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield releases that ranks cannot send, and wires that ranks and engines lack."""
        from offbeat.plugins.reshard.checks import release_clashes

        yield from release_clashes(config)

    def for_dry_run(self, section: BaseSyncConfig) -> Mapping[str, Any]:
        """Return the wire of stubs. Stubs have no devices."""
        return {"wire": "tcp"} if find_wire(section) != "tcp" else {}

    def check(self, config: "RunConfig", environ: Mapping[str, str]) -> Iterator[Finding]:
        """Report what engines receive, and check the libraries of the wire."""
        from offbeat.plugins.reshard.checks import check_releases, check_wire, find_devices

        yield from check_releases(config)
        yield from check_wire(config, find_devices(config), environ)

    def check_machines(self, config: "RunConfig", gpu_machines: Sequence[str]) -> None:
        """Check a wire that needs trainer and engines on one machine.

        Raises:
            MachinesApart: GPUs are on several machines.
        """
        from offbeat.plugins.reshard.checks import check_one_machine

        check_one_machine(config, gpu_machines)

    def make_sender(
        self,
        section: BaseSyncConfig,
        source: "WeightSource",
        host: str,
        incarnation: str,
        peers: "Peers",
        device: str,
    ) -> "ReshardSender":
        """Create the sender of a rank, and the server for engines.

        All ranks must call it together.
        """
        from offbeat.plugins.reshard.sender import make_reshard_sender

        own = of_kind(ReshardSyncConfig, section)
        return make_reshard_sender(own, source, host, incarnation, peers, device)

    def make_receiver(self, member: str, rank: int = 0, device: str = "cpu") -> "ReshardReceiver":
        """Create the receiving end of an engine, or of one of its workers."""
        from offbeat.plugins.reshard.receiver import ReshardReceiver

        return ReshardReceiver(member, rank, device)

    def decode_senders(self, senders: bytes, buckets: "tuple[BucketRoute, ...]") -> "ShardRoute":
        """Return the handle of a release from its ranks and its buckets."""
        from offbeat.plugins.reshard.messages import decode_route

        return decode_route(senders, buckets)


TRANSPORT: Final = Reshard()
