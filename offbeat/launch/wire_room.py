"""Check that trainer and engines are going to be where ``sync.wire`` can reach them."""

from collections.abc import Sequence

from offbeat.config.run import RunConfig
from offbeat.config.sections.sync import wire_of
from offbeat.messages.failures import OffbeatError


class MachinesApart(OffbeatError):
    """A wire that works within a machine, in a cluster that may place its ends on two."""

    wire: str
    machines: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"sync.wire={self.wire} works within a machine, and {len(self.machines)} of the cluster have GPUs: "
            f"{', '.join(self.machines)}. Set sync.wire to nccl or tcp, or join a cluster with one GPU machine"
        )


def check_one_machine(config: RunConfig, gpu_machines: Sequence[str]) -> None:
    """Check a wire that needs trainer and engines on one machine.

    Args:
        config: The run.
        gpu_machines: Addresses of the machines with GPUs, on any of which Ray may start an actor.

    Raises:
        MachinesApart: There are several.
    """
    if wire_of(config.sync) == "cuda_ipc" and len(gpu_machines) > 1:
        raise MachinesApart("cuda_ipc", tuple(gpu_machines))
