"""Composition root inside the controller's process: config and actor handles -> a controller."""

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
import yaml

from offbeat.actors.engine_layouts import EngineLayouts, layouts_of
from offbeat.actors.handles import Handle
from offbeat.actors.loaded_generator import make_loaded_generators
from offbeat.actors.ray_ports import RayGenerator, RayRollouts
from offbeat.actors.ray_run_files import check_sees
from offbeat.actors.ray_spool import RaySpool
from offbeat.actors.ray_trainer import RayTrainer
from offbeat.actors.unpublished_trainer import UnpublishedTrainer
from offbeat.algorithms.advantages import estimator
from offbeat.config.dump import to_yaml
from offbeat.config.limits import max_group_bytes
from offbeat.config.loss_spec import LossSpec
from offbeat.config.mixture import key_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.sync import sends_regions
from offbeat.controller.controller import Controller
from offbeat.controller.events import Opened
from offbeat.controller.journal import FileJournal, open_journal
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import Generator, Ports, Trainer
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.held_out import check_held_out
from offbeat.environments.inputs import DATA, SAMPLER, check_same, source_digest
from offbeat.environments.mixed_prompts import MixedPrompts
from offbeat.environments.prompt_files import FilePrompts
from offbeat.environments.prompts import PromptSource
from offbeat.generators.rows import RowGenerator
from offbeat.launch.controller_host import ControllerHost, segments_needed
from offbeat.launch.evaluate import NoPrompts
from offbeat.messages.failures import Component, DeadlineExceeded
from offbeat.messages.fences import Fence
from offbeat.messages.fixed_times import READ_JOURNAL_S, READ_PROMPTS_S
from offbeat.run_files.sharing import Sharing
from offbeat.runs.directory import JOURNAL
from offbeat.runs.inputs import record_input, targets
from offbeat.sampler.build import build_sampler
from offbeat.sampler.policy import Sampler
from offbeat.telemetry.assembly import run_telemetry
from offbeat.telemetry.evaluation_files import EvaluationFiles
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.logs import configure_logging
from offbeat.telemetry.redaction import Redactor
from offbeat.telemetry.trace import TRACE_FILE, TraceFile
from offbeat.trainers.no_trainer import NoTrainer
from offbeat.transfer_queue.spool import FOLDER

log = structlog.stdlib.get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Facts about the run that the controller's process needs."""

    config: RunConfig
    run_id: str
    run_dir: Path
    working_dir: Path  # searched first for user code
    driver: str  # name of the driver process
    sharing: Sharing | None = None  # None: there is only one machine
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])  # result of ``read_inputs``
    evaluates_only: bool = False  # there is no trainer; engines serve the weights that they load


@dataclass(frozen=True, slots=True)
class Actors:
    """Handles of all actors. The driver created and owns them."""

    ranks: Sequence[Handle]  # trainer ranks
    engines: Mapping[str, Handle]
    workers: Sequence[Handle]


async def build_run(spec: RunSpec, actors: Actors) -> ControllerHost:
    """Create all objects of a run, on the event loop that will run it.

    Raises:
        DeadlineExceeded: The journal cannot be read in time.
        RunDirNotShared: This process does not see the directory of the driver.
        InputChanged: A prompt file, or the sampler's source, has changed since the run began.
        HeldOutTrained: Rows of an evaluation set are trained on.
    """
    redactor = _enter_process(spec)
    ledger, journal = await _journal_of(spec)
    reading = partial(_read_prompts, spec)
    prompts, evaluation = await _in_thread(reading, "its prompt files", READ_PROMPTS_S)
    fence = Fence(spec.run_id, ledger.incarnation + 1)
    trace = TraceFile(spec.run_dir / TRACE_FILE, asyncio.get_running_loop().time)
    telemetry = _telemetry(spec)
    spool = RaySpool(spec.run_dir / FOLDER, segments_needed(ledger))
    scores = EvaluationFiles(spec.run_dir)
    rollouts = RayRollouts(actors.workers, spool.hold)
    ports = Ports(
        prompts=prompts,
        rollouts=rollouts,
        generators=_generators(spec, actors),
        trainer=_trainer(spec, actors),
        journal=journal,
        telemetry=telemetry,
        trace=trace,
        payloads=spool,
        evaluation=evaluation,
        scores=scores,
        cpu_s=time.process_time,
    )
    config = spec.config
    controller = Controller(
        config,
        fence,
        ports,
        sampler=_sampler(spec),
        advantages=estimator(config.algorithm.advantage, pass_k=config.algorithm.pass_k),
        loss=LossSpec.of(config),
        max_group_bytes=max_group_bytes(config),
        rng=random.Random(config.seed),
        ledger=ledger,
        driver=spec.driver,
        evaluates_only=spec.evaluates_only,
    )
    rollouts.report_joined(partial(controller.state.joined, Component.WORKER))
    rollouts.report_lost(controller.state.worker_lost)
    rollouts.report_to(controller.state.worker_reported)
    if fence.incarnation > 1:
        journal.past.take(Opened(spec.run_id, fence.incarnation, spec.driver))
        controller.progress.go_on_from(journal.past)
    return ControllerHost(
        controller,
        run_id=spec.run_id,
        run_dir=spec.run_dir,
        journal=journal,
        telemetry=telemetry,
        trace=trace,
        spool=spool,
        scores=scores,
        redactor=redactor,
    )


def _enter_process(spec: RunSpec) -> Redactor:
    """Take up the run's secrets, check that its directory is seen here, and begin to log."""
    if spec.sharing is not None:
        os.environ.update(spec.sharing.secrets)
        check_sees("controller", spec.run_dir, spec.sharing.token)
    redactor = Redactor.from_environment(config=spec.config)
    configure_logging("controller", spec.run_dir / "logs", run_id=spec.run_id, redactor=redactor)
    return redactor


def _telemetry(spec: RunSpec) -> Telemetry:
    config = spec.config
    return run_telemetry(
        config.wandb,
        tensorboard=config.tensorboard,
        samples_per_step=config.groups_per_step * config.samples_per_group,
        run_dir=spec.run_dir,
        run_id=spec.run_id,
        run_name=config.name,
        recipe=yaml.safe_load(to_yaml(config, os.environ)),
    )


def _generators(spec: RunSpec, actors: Actors) -> Mapping[str, Generator]:
    if spec.evaluates_only:
        return make_loaded_generators(actors.engines)
    if not spec.config.generator.has_engines:
        rows = RowGenerator()
        return {rows.name: rows}
    return {name: RayGenerator(name, engine) for name, engine in actors.engines.items()}


def _trainer(spec: RunSpec, actors: Actors) -> Trainer:
    if spec.evaluates_only:
        return NoTrainer(spec.config.model.path)
    kind = RayTrainer if spec.config.generator.has_engines else UnpublishedTrainer
    return kind(actors.ranks, spec.config.trainer, _layouts(spec.config, actors))


def _layouts(config: RunConfig, actors: Actors) -> EngineLayouts | None:
    """Return the layouts of engines whose ranks fetch what they need; None: they take all of it."""
    by_region = sends_regions(config.sync, len(actors.ranks))
    if not by_region or config.generator.backend != "vllm":
        return None
    return layouts_of(actors.engines, config.sync.deadline_s)


def _read_prompts(spec: RunSpec) -> tuple[PromptSource, dict[str, PromptSource]]:
    prompts = NoPrompts() if spec.evaluates_only else _prompts(spec)
    sets = make_evaluation_sets(spec.config, spec.inputs, spec.working_dir)
    check_held_out(spec.config, prompts, sets)
    return prompts, sets


def _prompts(spec: RunSpec) -> PromptSource:
    """Read and verify the run's prompts; a restarted controller reads them again."""
    prompts = make_prompts(spec.config, spec.inputs, spec.working_dir)
    sources: Mapping[str, PromptSource] = {"": prompts}
    if isinstance(prompts, MixedPrompts):
        sources = {name: each.source for name, each in prompts.sources.items()}
    for name, each in sources.items():
        key = key_in(name, DATA)
        if isinstance(each, FilePrompts) and key not in spec.inputs:
            record_input(spec.run_dir, key, each.digest)  # the driver could not read them
    return prompts


def _sampler(spec: RunSpec) -> Sampler:
    config, key = spec.config.sampler, SAMPLER
    if target := targets(spec.config).get(key):
        check_same(key, target, source_digest(target, spec.working_dir), spec.inputs)
    return build_sampler(config, spec.config.groups_per_step, spec.working_dir)


async def _journal_of(spec: RunSpec) -> tuple[Ledger, FileJournal]:
    """Read the journal in a thread, so that the driver gets replies however slow the disk is."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    opening = partial(
        open_journal,
        spec.run_dir / JOURNAL,
        partial(loop.run_in_executor, None),
        snapshot_records=spec.config.supervision.snapshot_records,
        unix_s=time.time,
    )
    what = f"its journal in {spec.run_dir / JOURNAL}"
    ledger, journal = await _in_thread(opening, what, READ_JOURNAL_S)
    took_s = round(loop.time() - began_at, 3)
    log.info("journal.read", incarnation=ledger.incarnation, took_s=took_s)
    return ledger, journal


async def _in_thread(call: Callable[[], T], what: str, within_s: float) -> T:
    """Call in a thread, so that this process answers however slow a disk is.

    Raises:
        DeadlineExceeded: ``what`` was not read in time.
    """
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.get_running_loop().run_in_executor(None, call)
    except TimeoutError as late:
        raise DeadlineExceeded("start of the controller", what, within_s) from late
