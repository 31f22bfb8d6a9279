"""Composition root in the controller's process: config and actor handles -> a controller."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from offbeat.actors.call import Handle
from offbeat.actors.ray_ports import RayGenerator, RayRollouts, RaySpool
from offbeat.actors.ray_run_files import check_sees
from offbeat.actors.ray_trainer import EngineLayouts, RayTrainer, UnpublishedTrainer, make_layouts
from offbeat.config.run import RunConfig
from offbeat.controller.ports import Generator, Trainer
from offbeat.generators.rows import RowGenerator
from offbeat.launch.controller_host import ControllerHost
from offbeat.launch.run_parts import MadePorts, RunSpec, assemble
from offbeat.telemetry.logs import Redactor, configure_logging
from offbeat.trainers.no_trainer import NoTrainer
from offbeat.transfer_queue.spool import FOLDER


@dataclass(frozen=True, slots=True)
class Actors:
    """Handles of all actors. The driver creates and owns the actors."""

    ranks: Sequence[Handle]  # trainer ranks
    engines: Mapping[str, Handle]
    workers: Sequence[Handle]


async def build_run(spec: RunSpec, actors: Actors) -> ControllerHost:
    """Enter the controller's process and create all objects of a run, on its event loop.

    Raises:
        RunDirNotShared: This process does not see the directory of the driver.
        OffbeatError: Any error that ``assemble`` raises.
    """
    _enter_process(spec)
    return await assemble(spec, partial(_make_ports, actors))


def _enter_process(spec: RunSpec) -> None:
    """Set the run's secrets, check that this process sees the run directory, and start logging."""
    if spec.sharing is not None:
        os.environ.update(spec.sharing.secrets)
        check_sees("controller", spec.run_dir, spec.sharing.token)
    redactor = Redactor.from_environment(config=spec.config)
    configure_logging("controller", spec.run_dir / "logs", run_id=spec.run_id, redactor=redactor)


def _make_ports(actors: Actors, spec: RunSpec, needed: Iterable[str]) -> MadePorts:
    keeps = spec.config.transfer_queue.spool == "keep"
    spool = RaySpool(spec.run_dir / FOLDER, needed, keeps_all=keeps)
    return MadePorts(
        trainer=_make_trainer(spec, actors),
        generators=_make_generators(spec, actors),
        rollouts=RayRollouts(actors.workers, spool.hold),
        spool=spool,
    )


def _make_generators(spec: RunSpec, actors: Actors) -> Mapping[str, Generator]:
    if not spec.config.generator.has_engines:
        rows = RowGenerator()
        return {rows.name: rows}
    return {name: RayGenerator(name, engine) for name, engine in actors.engines.items()}


def _make_trainer(spec: RunSpec, actors: Actors) -> Trainer:
    if spec.evaluates_only:
        return NoTrainer(spec.config.model.path)
    kind = RayTrainer if spec.config.generator.has_engines else UnpublishedTrainer
    return kind(actors.ranks, spec.config.trainer, _find_layouts(spec.config, actors))


def _find_layouts(config: RunConfig, actors: Actors) -> EngineLayouts | None:
    """Return engine layouts if engines fetch only their own shards, else None."""
    by_region = config.sync.sends_regions(len(actors.ranks))
    if not by_region or not config.generator.has_layout:
        return None
    return make_layouts(actors.engines, config.sync.deadline_s)
