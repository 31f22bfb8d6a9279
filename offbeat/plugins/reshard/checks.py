"""Checks of a reshard: the data that engines receive, and the wires for device memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offbeat.config.engine_plugin import find_engine
from offbeat.config.limits import trainer_device, trainer_resources
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.messages.failures import FixableError
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.reshard.section import BUCKETS_AT_ONCE, ReshardSyncConfig, find_wire


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
            f"sync.wire={wire} carries device memory, but torch {devices.torch} sees no CUDA device",
            "Set sync.wire to tcp, or install a CUDA build of torch on a machine with GPUs.",
        )
    elif wire == "nccl" and not devices.has_nccl:
        yield error(
            "weight sync",
            f"sync.wire=nccl needs a build of torch with NCCL, but torch {devices.torch} has none",
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
        problem = f"works within a machine, but {len(gpu_machines)} of the cluster have GPUs: {', '.join(gpu_machines)}"
        fix = "Set sync.wire to nccl or tcp, or join a cluster with one GPU machine"
        raise MachinesApart("sync.wire=cuda_ipc", problem, fix)


def deadline_clashes(sync: ReshardSyncConfig) -> Iterator[Clash]:
    """Yield a sync deadline that leaves no time to repeat a broken transfer."""
    limit_s = BUCKETS_AT_ONCE * sync.chunk_mib / sync.slowest_mib_s + sync.slack_s
    if sync.deadline_s < 4 * limit_s:
        yield Clash(
            ("sync.deadline_s", "sync.slack_s", "sync.slowest_mib_s", "sync.chunk_mib"),
            f"sync.deadline_s={sync.deadline_s:g} would pass before a lost engine is noticed "
            f"and the others get the weights again: that needs up to four times the {limit_s:g} "
            "s that a chunk may take",
            f"Set sync.deadline_s to {4 * limit_s:g} or more, or sync.slack_s lower.",
        )


def release_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield releases that ranks cannot send, and wires that ranks and engines lack."""
    if (wire := find_wire(config.sync)) == "tcp":
        return
    if config.sync.delta:
        yield Clash(
            ("sync.delta", "sync.wire"),
            f"sync.delta=true does not fit sync.wire={wire}: changes are encoded in main memory, but "
            "each wire of devices keeps memory of fixed sizes",
            "Leave sync.delta out, or set sync.wire to tcp.",
        )
    yield from device_clashes(config, wire)


def device_clashes(config: RunConfig, wire: str) -> Iterator[Clash]:
    """Yield wires between devices that ranks and engines do not have."""
    generator = config.generator
    if not generator.has_engines:
        yield Clash(
            ("sync.wire", "generator.backend"),
            f"sync.wire={wire} has no effect with generator.backend={generator.backend}, which has no "
            "engines",
            "Leave sync.wire out.",
        )
        return
    served = "cpu" if generator.backend == "stub" else generator.device
    devices = {"trainer": trainer_device(config.trainer), "generator": served}
    for section, device in devices.items():
        if not device.startswith("cuda"):
            yield Clash(
                ("sync.wire", f"{section}.device"),
                f"sync.wire={wire} carries device memory, but {section}.device={device}",
                f"Set sync.wire to tcp, or {section}.device to cuda.",
            )
            return
    yield from _sharing_clashes(config, wire)


def _sharing_clashes(config: RunConfig, wire: str) -> Iterator[Clash]:
    """Yield GPU settings that contradict the wire: nccl needs separate GPUs, cuda_ipc a shared one.

    Ray shows a process only its reserved GPUs. Several processes can reserve fractions of one GPU.
    """
    ranks, generator = trainer_resources(config), config.generator
    reserved = sum(each.gpus for each in ranks) + generator.gpus * generator.engines
    if wire == "cuda_ipc" and reserved > 1:
        yield Clash(
            ("sync.wire", "trainer.gpus", "generator.gpus"),
            f"sync.wire=cuda_ipc opens memory of a GPU that both processes see, but {len(ranks)} trainer "
            f"ranks and {generator.engines} engines that reserve {reserved:g} GPUs together do not share one",
            "Set sync.wire to nccl."
            if len(ranks) > 1
            else "Lower trainer.gpus and generator.gpus until all of them together are 1 or less, or set "
            "sync.wire to nccl.",
        )
    if wire == "nccl" and min(generator.gpus, *(each.gpus for each in ranks)) < 1:
        yield Clash(
            ("sync.wire", "trainer.gpus", "generator.gpus"),
            "sync.wire=nccl needs a separate GPU for every trainer rank and engine, but "
            "fractions of trainer.gpus or generator.gpus may share one",
            "Set both to 1 or more, or sync.wire to cuda_ipc for one GPU, or to tcp.",
        )
