"""Checks the packages, W&B, the cluster and the devices that the run needs."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from offbeat.config.limits import encoder_ranks, trainer_ranks, trainer_resources
from offbeat.config.run import RunConfig
from offbeat.doors import find_installed_version, find_problems
from offbeat.launch.gcs_watch import connect
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.messages.versions import is_within
from offbeat.telemetry.hub import trackers_of
from offbeat.trainers.torch_versions import refuse_sharding
from offbeat.trainers.trainer_plugin import find_parts, find_trainer

_NEEDED: Final = ("torch", "transformers", "tensordict")
TESTED: Final = {"torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}
"""First and last minor version that passed the tests of the core."""
_CONNECT_S: Final = 5.0


def check_packages(
    config: RunConfig, find_version: Callable[[str], str | None] = find_installed_version
) -> Iterator[Finding]:
    """Check that packages are installed, by their metadata. Import nothing.

    ``find_version`` returns the version of a package, or None if it is not installed.
    """
    extras = _extras(config)
    runtime = ("ray",) if config.runtime.backend == "ray" else ()
    log = ("pyarrow",) if config.rollout.log else ()
    for name in (*runtime, *_NEEDED, *log, *extras):
        if (version := find_version(name)) is not None:
            yield _check_version(config, name, version)
        else:
            of = f"[{extras[name]}]" if name in extras else "[ray]" if name == "ray" else ""
            fix = f"Install it: pip install 'offbeat{of}'"
            if name == "ray":
                fix += ", or run in one process: runtime=local"
            if name == "pyarrow":
                fix += ", or set rollout.log to false"
            yield error(name, "is not installed in this Python", fix)


def _check_version(config: RunConfig, name: str, version: str) -> Finding:
    """Classify a version: too old for this recipe, never tested, or fine."""
    if name == "torch" and _shards(config) and (refusal := refuse_sharding(version)):
        problem, fix = refusal
        return error(name, f"the trainer {problem}", f"{fix}.")
    first, last = TESTED.get(name, (version, version))
    if is_within(version, first, last):
        return ok(name, version)
    return warning(
        name,
        f"{version} was never tested; {first} to {last} were",
        f"Install {name} {last}, or run the tests with this one: make test-versions.",
    )


def _shards(config: RunConfig) -> bool:
    """Return whether FSDP2 shards a model over ranks of the torch trainer, or of the encoder."""
    ranks = trainer_ranks(config) if config.trainer.backend == "torch" else 1
    return ranks > 1 or encoder_ranks(config.trainer) > 0


def _extras(config: RunConfig) -> dict[str, str]:
    """Return the packages that only some recipes need, each with the extra that installs it."""
    if (plugin := find_trainer(config.trainer.backend)) is not None:
        return dict(plugin.packages)
    return {name: extra for part in find_parts(config) for name, extra in part.packages.items()}


def check_trackers(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the trackers that the recipe names or could use, and that no plug-in is broken."""
    for problem in find_problems():
        yield warning(problem.subject, problem.problem, f"{problem.fix}.")
    for _, tracker, section in trackers_of(config):
        yield from tracker.check(section, environ)


def check_ray_address(
    environ: Mapping[str, str], reach: Callable[[str, int], object] | None = None
) -> Iterator[Finding]:
    """Check the cluster that the run joins, and that it answers. Ray would retry for minutes.

    ``reach`` connects to a host and a port, or raises OSError. None means by TCP.
    """
    address = environ.get("RAY_ADDRESS")
    if not address:
        yield ok("ray cluster", "a local one is started for the run")
        return
    if problem := _unreachable(address, reach or partial(connect, within_s=_CONNECT_S)):
        yield error(
            "ray cluster",
            f"RAY_ADDRESS={address}: {problem}",
            "Name a cluster that runs as HOST:6379, or unset RAY_ADDRESS to run only on this machine.",
        )
    else:
        yield warning(
            "ray cluster",
            f"RAY_ADDRESS={address}: the run goes to that cluster, but this report is about this machine",
            "Unset RAY_ADDRESS to run here, or run offbeat check on the cluster.",
        )


def check_one_process(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report that a run uses one process, and any cluster that it therefore does not join."""
    if address := environ.get("RAY_ADDRESS"):
        yield warning(
            "runtime",
            f"runtime.backend=local runs in this process; RAY_ADDRESS={address} is not used",
            "Leave runtime.backend out to run on that cluster.",
        )
    else:
        yield ok("runtime", "local: all parts in this process, without Ray")


def _unreachable(address: str, reach: Callable[[str, int], object]) -> str:
    """Return why the cluster is unreachable, or an empty string if it may be reachable."""
    if address in {"auto", "local"}:  # Ray finds these itself
        return ""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return "this is not an address"
    try:
        reach(host.strip("[]"), int(port))
    except (OSError, OverflowError) as failure:  # a port beyond 65535 overflows
        return f"nobody answers there: {failure}"
    return ""


def gpus_wanted(config: RunConfig) -> float:
    """Return how many GPUs Ray must find for all actors, or 1 for a run in one process on a GPU."""
    trainer, generator = config.trainer, config.generator
    if config.runtime.backend == "local":
        devices = [each.device for each in (trainer, generator) if each.backend != "stub"]
        return float(any(device.startswith("cuda") for device in devices))
    ranks = [] if trainer.backend == "stub" else trainer_resources(config)
    of_trainer = sum(each.gpus for each in ranks)
    return of_trainer + (generator.gpus * generator.engines if generator.backend != "stub" else 0)


def check_gpus(config: RunConfig, available: int | None) -> Iterator[Finding]:
    """Check the GPUs. ``available`` is None if they were not counted, because none is needed."""
    wanted = gpus_wanted(config)
    if available is None:
        yield ok("gpus", "none asked for")
    elif wanted > available:
        yield error(
            "gpus",
            f"{wanted:g} asked for by trainer.gpus and generator.gpus, {available} found by torch",
            "Use device: cpu and gpus: 0, share with fractions as in generator.gpus=0.5, or install a "
            "CUDA build of torch on a machine with GPUs.",
        )
    else:
        yield ok("gpus", f"{wanted:g} of {available}")


def count_gpus(config: RunConfig) -> int | None:
    """Count GPUs with torch, but only if one is requested: importing torch takes seconds."""
    sections = (config.trainer, config.generator)
    devices = [section.device for section in sections if section.backend != "stub"]
    if gpus_wanted(config) == 0 and not any(device.startswith("cuda") for device in devices):
        return None
    import torch

    return torch.cuda.device_count()
