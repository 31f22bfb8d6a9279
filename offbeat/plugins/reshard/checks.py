"""Checks of a reshard: the data that engines receive, and the wires for device memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offbeat.config.engine_plugin import find_engine
from offbeat.config.run import RunConfig
from offbeat.messages.failures import FixableError
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.reshard.section import find_wire


class MachinesApart(FixableError):
    """A wire works only within one machine, but its ends may be on two.

    Fix: set ``sync.wire`` to ``nccl`` or ``tcp``.
    """

    form = "{} {}. {}"


def check_releases(config: RunConfig) -> Iterator[Finding]:
    """Report how releases are cut and how engines load them."""
    engines = find_engine(config.generator.backend)
    if engines is not None:
        yield from engines.check_weight_sync(config)
    elif config.generator.backend == "embedded":
        yield ok(
            "weight sync",
            "every trainer rank sends the regions that it holds, and engines load them",
        )


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of this machine that torch sees."""

    torch: str  # version of torch
    count: int
    has_nccl: bool


def find_devices(config: RunConfig) -> Devices | None:
    """Ask torch for devices, but only if a wire needs one, because the import needs seconds."""
    if find_wire(config.sync) == "tcp":
        return None
    import torch  # noqa: PLC0415 -- only for a wire that needs a device

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return Devices(torch.__version__, torch.cuda.device_count(), nccl)


def check_wire(
    config: RunConfig, devices: Devices | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Check that the library of ``sync.wire`` exists, and warn that no GPU has run the wire yet.

    ``check_gpus`` compares the devices that the run needs with this machine's devices.
    """
    wire = find_wire(config.sync)
    if devices is None or wire == "tcp":
        return
    if not devices.count:
        yield error(
            "weight sync",
            f"sync.wire={wire} carries device memory, and torch {devices.torch} sees no CUDA device",
            "Set sync.wire to tcp, or install a CUDA build of torch on a machine with GPUs.",
        )
    elif wire == "nccl" and not devices.has_nccl:
        yield error(
            "weight sync",
            f"sync.wire=nccl needs a build of torch with NCCL, and torch {devices.torch} has none",
            "Set sync.wire to tcp, or install another build of torch.",
        )
    else:
        text = f"sync.wire={wire} has not been run on a GPU"
        if wire == "cuda_ipc" and environ.get("RAY_ADDRESS"):
            text += ", and works within a machine: a cluster in which several have GPUs is refused at the start"
        fix = "Run make test-gpu here first; sync.wire=tcp is what has been run."
        yield warning("weight sync", text, fix)


def check_one_machine(config: RunConfig, gpu_machines: Sequence[str]) -> None:
    """Check a wire that needs trainer and engines on one machine.

    Args:
        config: The run.
        gpu_machines: Addresses of all machines with GPUs. Ray may start an actor on any of them.

    Raises:
        MachinesApart: GPUs are on several machines.
    """
    if find_wire(config.sync) == "cuda_ipc" and len(gpu_machines) > 1:
        problem = f"works within a machine, and {len(gpu_machines)} of the cluster have GPUs: {', '.join(gpu_machines)}"
        fix = "Set sync.wire to nccl or tcp, or join a cluster with one GPU machine"
        raise MachinesApart("sync.wire=cuda_ipc", problem, fix)
