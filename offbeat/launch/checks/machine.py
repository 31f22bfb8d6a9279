"""Compares cores, memory and shared memory of this machine with the needs of the run.

Also composes the lines that a bug report needs: versions of Python, its packages and this machine.
"""

import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Final

import psutil

from offbeat.config.limits import (
    find_encoder,
    shares_weights,
    trainer_ranks,
    trainer_resources,
)
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen, sends_additions
from offbeat.doors import find_installed_version
from offbeat.launch.checks.model_files import ModelFiles
from offbeat.messages.finding import Finding, error, ok, size, warning
from offbeat.trainers.trainer_plugin import freezing_part
from offbeat.weight_sync.dtypes import ITEMSIZE

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where Ray keeps its object store on Linux
_PROCESS_BYTES: Final = 600 * 2**20
"""Memory of one actor with torch and transformers imported, before it holds a model, in bytes."""
_STORE_OF_MEMORY: Final = 0.3
_STORE_OF_SHARED: Final = 0.95
_LARGEST_STORE: Final = 200e9
"""Limits of Ray's default object store: share of main memory, share of shared memory, bytes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of this machine."""

    cores: int
    memory_bytes: int
    memory_free_bytes: int
    shared_memory_bytes: int | None  # None where the system has none


def this_machine() -> Machine:
    """Measure the resources of this machine."""
    memory = psutil.virtual_memory()
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    affinity = len(psutil.Process().cpu_affinity() or []) if psutil.LINUX else 0
    return Machine(affinity or psutil.cpu_count() or 1, memory.total, memory.available, shared)


def check_cores(config: RunConfig, machine: Machine) -> Iterator[Finding]:
    """Check that each thread that computes at the same time has a core."""
    section = config.trainer
    ranks = [] if section.backend == "stub" else trainer_resources(config)
    trainer = sum(each.threads for each in ranks)
    engines = (
        0
        if config.generator.backend == "stub"
        else config.generator.engines * config.generator.threads
    )
    summary = f"{trainer} trainer and {engines} generator threads on {machine.cores} cores"
    if trainer + engines > machine.cores:
        of_encoders = ", trainer.encoder.threads" if find_encoder(section) else ""
        threads = f"trainer.threads{of_encoders}"
        least = len(ranks) + (config.generator.engines if engines else 0)
        fix = (
            f"Lower {threads}, generator.threads or generator.engines to {machine.cores} in all."
            if least <= machine.cores
            else f"Use a machine of {least} cores or more, or fewer than {len(ranks)} trainer ranks and "
            f"{least - len(ranks)} engines: each computes on one thread at least."
        )
        yield warning("cores", f"{summary}: they will take turns", fix)
    else:
        yield ok("cores", summary)


def memory_needed_bytes(config: RunConfig, model: ModelFiles, trained: int | None = None) -> int:
    """Return a lower bound of main memory: weights and optimizer state, without activations.

    The trainer holds weights, gradients, the two moments of AdamW, and one more copy of the weights
    while they are published. With a KL penalty it also holds the frozen reference. A teacher adds
    one copy per rank and is assumed to be as large as the model. Each engine holds the weights.

    If the run trains adapters, the trainer holds the weights, the adapters, and gradients and
    moments of the adapters. An engine that merges adapters holds the weights twice: as loaded and
    as served. With ``sync.delta``, each engine also holds the base, and so does the trainer if its
    transport keeps no snapshot. If engines share the trainer's weights, they hold none, and nothing
    is published.

    Args:
        config: The recipe.
        model: Facts of its model.
        trained: Number of parameters that ``trainer.freeze`` leaves, or of adapters. Other
            parameters have neither gradients nor moments. None means all parameters, or with
            adapters, no parameters.
    """
    each = ITEMSIZE[config.model.dtype]
    merges = sends_additions(config)
    copies = 0 if merges or shares_weights(config) else 1  # the published weights
    bases = config.sync.delta
    copies += bases and config.sync.transport == "object_store"
    processes = 2  # controller and environment workers
    if config.trainer.backend != "stub":
        processes += trainer_ranks(config)
    if config.generator.backend != "stub":
        processes += config.generator.engines
        copies += (merges + bases) * config.generator.engines
    if config.runtime.backend == "local":
        processes = 1
    held = _held_bytes(config, model, trained, on_gpu=False)
    return held + model.parameters * each * copies + processes * _PROCESS_BYTES


def _held_bytes(config: RunConfig, model: ModelFiles, trained: int | None, *, on_gpu: bool) -> int:
    """Return the bytes that trainer and engines compute with, on GPUs or on CPUs.

    Weights that trainer and engines share are counted once.
    """
    each = ITEMSIZE[config.model.dtype]
    copies = states = 0
    if config.trainer.backend != "stub" and _on_gpu(config.trainer.device) == on_gpu:
        loss, adapts = config.algorithm.loss, model_is_frozen(config)
        teachers = trainer_ranks(config) if loss.teacher_path is not None else 0
        frozen = loss.needs_reference_logprobs + teachers
        copies += 1 + (teachers if adapts else frozen)
        if adapts:
            states = 4 * each * (trained or 0)
        else:
            states = 3 * each * (model.parameters if trained is None else trained)
    if config.generator.backend != "stub" and _on_gpu(config.generator.device) == on_gpu:
        copies += 0 if shares_weights(config) else config.generator.engines
    return model.parameters * each * copies + states


def check_one_gpu(
    config: RunConfig, model: ModelFiles, gpu: int | None, trained: int | None = None
) -> Iterator[Finding]:
    """Check the GPU that trainer and engines of one process share.

    Args:
        config: The recipe. A run on Ray gets no finding, because its parts reserve GPUs separately.
        model: Facts of its model.
        gpu: Memory of the GPU in bytes, or None if unknown or if the trainer is on the CPU.
        trained: As in ``memory_needed_bytes``.
    """
    if config.runtime.backend != "local" or gpu is None:
        return
    needed = _held_bytes(config, model, trained, on_gpu=True)
    seen = (
        f"about {size(needed)} of weights and optimizer state of one process, activations and caches not "
        f"counted; the GPU has {size(gpu)}"
    )
    if needed <= gpu:
        yield ok("gpu memory", seen)
        return
    shared = "" if shares_weights(config) else "generator.share_weights=true, "
    fix = f"Use {shared}a smaller model, model.dtype=bfloat16, or a larger GPU."
    yield error("gpu memory", seen, fix)


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda")


def check_memory(
    config: RunConfig, machine: Machine, model: ModelFiles, trained: int | None = None
) -> Iterator[Finding]:
    """Check memory. It is an error to need more than the total, but not more than is free.

    ``trained`` is the same as in ``memory_needed_bytes``.
    """
    needed = memory_needed_bytes(config, model, trained)
    part = freezing_part(config) if trained else None
    additions = "" if part is None else f" and {trained:,} of {part.additions}"
    seen = (
        f"about {size(needed)} needed for {model.parameters:,} parameters{additions}, activations not "
        "counted; "
        f"{size(machine.memory_free_bytes)} of {size(machine.memory_bytes)} free"
    )
    if needed > machine.memory_bytes:
        lower = "" if part is None else f"a lower {part.size_key}, "
        fix = (
            f"Use a smaller model, {lower}fewer generator.engines, model.dtype=bfloat16, or a larger "
            "machine."
        )
        yield error("memory", seen, fix)
    elif needed > machine.memory_free_bytes:
        yield warning("memory", seen, "Close other programs, or use fewer generator.engines.")
    else:
        yield ok("memory", seen)


def release_bytes(config: RunConfig, model: ModelFiles) -> int:
    """Return the bytes of a full release in Ray's object store, or 0 if it holds none."""
    sends = config.generator.has_engines and config.sync.transport == "object_store"
    if not sends or sends_additions(config):
        return 0
    each = ITEMSIZE[config.sync.wire_dtype or config.model.dtype]
    return model.parameters * (1 if config.sync.quantize else each)


def check_shared_memory(
    config: RunConfig, machine: Machine, model: ModelFiles
) -> Iterator[Finding]:
    """Check Ray's object store, which carries payloads and published weights."""
    if machine.shared_memory_bytes is None:
        return
    release = release_bytes(config, model)
    store = min(
        _STORE_OF_MEMORY * machine.memory_bytes,
        _STORE_OF_SHARED * machine.shared_memory_bytes,
        _LARGEST_STORE,
    )
    if release > store:
        seen = (
            f"each release of the weights has {size(release)}, and Ray's object store here {size(store)}: Ray "
            "would write it to disk and read it back at each sync"
        )
        fix = (
            "Set sync.transport to reshard, or enlarge the store (ray start --object-store-memory)."
        )
        yield warning("shared memory", seen, fix)
        return
    wanted = int(config.buffer.capacity_mib * 2**20) + 2 * release
    two = " and two versions of the weights" if release else ""
    seen = (
        f"{size(machine.shared_memory_bytes)} free in {_SHARED_MEMORY}; a full buffer{two} "
        f"{'take' if two else 'takes'} {size(wanted)}"
    )
    if wanted > machine.shared_memory_bytes:
        fix = "Lower buffer.capacity_mib, or enlarge it (in a container: --shm-size). Ray spills to disk otherwise."
        yield warning("shared memory", seen, fix)
    else:
        yield ok("shared memory", seen)


_DRIVER: Final = Path("/proc/driver/nvidia/version")
_NAME: Final = re.compile(r"[\w.-]+")
_ABSENT: Final = "not installed"
_HEADING: Final = "versions, for a bug report"


def versions() -> str:
    """Return these lines, without paths and without names of machines or users."""
    machine = this_machine()
    lines = [
        ("offbeat", find_installed_version("offbeat") or _ABSENT),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("machine", f"{machine.cores} cores, {size(machine.memory_bytes)} of memory"),
        ("gpu driver", _gpu_driver()),
        *_packages(),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([_HEADING, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _packages() -> Iterator[tuple[str, str]]:
    """Yield offbeat's required packages, and installed ones of its extras, but no dev tools."""
    is_optional = {
        match.group(): "extra ==" in text
        for text in reversed(requires("offbeat") or [])
        if not text.rstrip("\"'").endswith("dev") and (match := _NAME.match(text)) is not None
    }
    for name in sorted(is_optional, key=str.casefold):
        version = find_installed_version(name)
        if version is not None or not is_optional[name]:
            yield name, version or _ABSENT


def _gpu_driver() -> str:
    try:
        return _DRIVER.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return "none"
