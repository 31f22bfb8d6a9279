"""Settings of a recipe that clash with ``sync.transport: reshard``."""

from collections.abc import Iterator

from offbeat.config.limits import trainer_device, trainer_resources
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.plugins.reshard.section import BUCKETS_AT_ONCE, ReshardSyncConfig, find_wire


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
    """Yield releases that ranks cannot send, and wires that ranks and engines do not have."""
    if (wire := find_wire(config.sync)) == "tcp":
        return
    if config.sync.delta:
        yield Clash(
            ("sync.delta", "sync.wire"),
            f"sync.delta=true does not fit sync.wire={wire}: changes are encoded in main memory, and "
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
                f"sync.wire={wire} carries device memory, and {section}.device={device}",
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
            f"sync.wire=cuda_ipc opens memory of a GPU that both processes see, and {len(ranks)} trainer "
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
