"""Finds recipes that one process cannot run, and settings that shared weights exclude."""

from collections.abc import Iterator

from offbeat.config.base import of_kind
from offbeat.config.engine_plugin import find_engine
from offbeat.config.limits import shares_weights, trainer_device, trainer_ranks
from offbeat.config.mixture import environment_workers, has_media
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.config.trainer_backends import find_trainer_rules
from offbeat.doors import find_media

_ON_RAY = "Leave runtime.backend out, to run on Ray"


def local_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield every setting that a run in one process cannot use. A dry run uses stubs instead."""
    if config.runtime.backend != "local":
        return
    if (workers := environment_workers(config)) > 1:
        yield _clash(
            "environment.workers",
            workers,
            "one worker serves all groups of a process",
            "set environment.workers to 1",
        )
    if config.sync.transport != "object_store":
        yield _clash(
            "sync.transport",
            config.sync.transport,
            "engines read the trainer's release from memory of their process",
            "leave sync.transport out",
        )
    engines = find_engine(config.generator.backend)
    if engines is not None and engines.needs_ray_because:
        yield _clash(
            "generator.backend",
            config.generator.backend,
            engines.needs_ray_because,
            "set generator.backend to embedded",
        )
    if (plugin := find_trainer_rules(config.trainer.backend)) is not None:
        yield _clash(
            "trainer.backend",
            config.trainer.backend,
            plugin.why_not_local,
            "set trainer.backend to torch",
        )
    elif (ranks := trainer_ranks(config)) > 1:
        yield Clash(
            ("runtime.backend", "trainer.data_parallel", "trainer.tensor_parallel"),
            f"runtime.backend=local cannot run {ranks} trainer ranks: each rank is a process",
            f"{_ON_RAY}, or set trainer.data_parallel and trainer.tensor_parallel to 1 and leave "
            "trainer.encoder out.",
        )


def _clash(key: str, value: object, problem: str, fix: str) -> Clash:
    return Clash(
        ("runtime.backend", key),
        f"runtime.backend=local cannot run with {key}={value}: {problem}",
        f"{_ON_RAY}, or {fix}.",
    )


def shared_weights_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings for which engines need separate weights; none in a dry run."""
    if not shares_weights(config):
        return
    if (backend := config.runtime.backend) != "local":
        yield needs_copies(
            "runtime.backend",
            f"={backend}",
            "trainer and engines are processes, each with its own memory",
            "Set runtime.backend to local",
        )
    if (staleness := config.sampler.max_staleness) != 0:
        yield needs_copies(
            "sampler.max_staleness",
            f"={staleness}",
            "samples become stale if engines decode while the trainer is ahead, but with one "
            "copy of the weights decoding and optimizer steps alternate",
            "Set sampler.max_staleness to 0",
        )
    if config.sync.delta:
        yield needs_copies("sync.delta", "", "no weights are sent", "Set sync.delta to false")
    if has_media(config):
        key = f"environment.{find_media().key}"
        yield needs_copies(key, "", "it is untested with media", "Train on text prompts")
    engine = of_kind(EmbeddedGeneratorConfig, config.generator)
    trained_on, served_on = trainer_device(config.trainer), engine.device
    if trained_on != served_on:
        yield Clash(
            ("generator.share_weights", "trainer.device", "generator.device"),
            f"generator.share_weights needs one device: trainer.device={trained_on}, but "
            f"generator.device={served_on}",
            "Set both to the same device, or generator.share_weights to false.",
        )


def needs_copies(key: str, value: str, problem: str, fix: str) -> Clash:
    """Return a clash with engines that compute with the trainer's tensors."""
    return Clash(
        ("generator.share_weights", key),
        f"generator.share_weights cannot work with {key}{value}: {problem}",
        f"{fix}, or set generator.share_weights to false.",
    )
