"""Check of the wires of a reshard that carry device memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offbeat.config.run import RunConfig
from offbeat.config.sections.sync import wire_of
from offbeat.messages.finding import Finding, error, warning


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of this machine, as torch sees them."""

    torch: str  # its version
    count: int
    has_nccl: bool


def find_devices(config: RunConfig) -> Devices | None:
    """Ask torch, but only where a wire needs a device: importing it takes seconds."""
    if wire_of(config.sync) == "tcp":
        return None
    import torch

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return Devices(torch.__version__, torch.cuda.device_count(), nccl)


def check_wire(
    config: RunConfig, devices: Devices | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Check that ``sync.wire`` has its library, and say that no GPU has shown that it works.

    ``check_gpus`` compares the devices that the run needs with this machine's.
    """
    wire = wire_of(config.sync)
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
