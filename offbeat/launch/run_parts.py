"""Creates the parts of a run that all runtimes have in common: controller, inputs and outputs.

Also composes the constructor arguments of a run's parts, for any runtime.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
import yaml

from offbeat.algorithms.advantages import AdvantageEstimator
from offbeat.algorithms.custom_advantage import load_estimator
from offbeat.config.by_value import PackedValue, unpack
from offbeat.config.limits import max_group_bytes, trainer_resources
from offbeat.config.loss_spec import LossSpec
from offbeat.config.mixture import environment_workers, key_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.yaml_text import to_yaml
from offbeat.controller.controller import Controller
from offbeat.controller.failpoints import Failpoints, no_failpoints
from offbeat.controller.journal import FileJournal, open_journal
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import Generator, Ports, ReportingRollouts, Trainer
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.held_out import check_held_out
from offbeat.environments.inputs import ADVANTAGE, DATA, LOSS, SAMPLER, check_same, source_digest
from offbeat.environments.prompt_files import FilePrompts
from offbeat.environments.prompts import MixedPrompts, PromptSource
from offbeat.environments.tokenizer import chosen_class
from offbeat.generators.spec import EngineSpec
from offbeat.launch.controller_host import ControllerHost, segments_needed
from offbeat.launch.evaluate import NoPrompts
from offbeat.messages.failures import Component, DeadlineExceeded
from offbeat.messages.fences import Fence
from offbeat.messages.fixed_times import ADVANTAGE_S, READ_JOURNAL_S, READ_PROMPTS_S
from offbeat.rollouts.worker import EnvironmentSpec
from offbeat.run_files.sharing import Sharing
from offbeat.runs.directory import JOURNAL
from offbeat.runs.inputs import record_input, targets
from offbeat.sampler.build import build_sampler
from offbeat.sampler.policy import Sampler
from offbeat.telemetry.evaluation_files import EvaluationFiles
from offbeat.telemetry.hub import Telemetry, run_telemetry
from offbeat.telemetry.logs import Redactor
from offbeat.telemetry.trace import TRACE_FILE, TraceFile
from offbeat.telemetry.tracker import TrackedRun
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.spool_reader import SpoolReader

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
    evaluates_only: bool = False  # no trainer; engines serve the weights that they load
    spares_prompts: bool = False  # evaluations also keep prompts without a valid sample
    values: tuple[PackedValue, ...] = ()  # objects that the user passed by value

    @property
    def loss_values(self) -> tuple[PackedValue, ...]:
        """Return the loss if it was passed by value. Only trainers load it: it imports torch."""
        loss = targets(self.config).get(LOSS)
        return tuple(each for each in self.values if each.target == loss)

    @property
    def other_values(self) -> tuple[PackedValue, ...]:
        """Return the objects passed by value that controller and environment workers load."""
        return tuple(each for each in self.values if each not in self.loss_values)


@dataclass(frozen=True, slots=True)
class MadePorts:
    """Ports of the controller that differ between runtimes."""

    trainer: Trainer
    generators: Mapping[str, Generator]
    rollouts: ReportingRollouts
    spool: SpoolReader[Any]
    cpu_s: Callable[[], float] = time.process_time
    """Returns the CPU seconds since the process started that count as the controller's."""
    failpoints: Failpoints = no_failpoints


MakePorts = Callable[[RunSpec, Iterable[str]], MadePorts]
"""Creates the ports of a run, given the spool segments to keep, on the controller's event loop."""


async def assemble(spec: RunSpec, make_ports: MakePorts) -> ControllerHost:
    """Create all objects of a run, on the event loop that will run it.

    Raises:
        DeadlineExceeded: The journal or the prompt files cannot be read in time.
        InputChanged: A prompt file, or the sampler's source, has changed since the run began.
        HeldOutTrained: The run would train on rows of an evaluation set.
    """
    ledger, journal = await _read_journal(spec)
    with ExitStack() as unless_assembled:
        unless_assembled.callback(journal.close)
        host = await _assemble_around(spec, make_ports, ledger, journal)
        unless_assembled.pop_all()
    return host


async def _assemble_around(
    spec: RunSpec, make_ports: MakePorts, ledger: Ledger, journal: FileJournal
) -> ControllerHost:
    reading = partial(_read_prompts, spec)
    prompts, evaluation = await _call_in_thread(reading, "its prompt files", READ_PROMPTS_S)
    fence = Fence(spec.run_id, ledger.incarnation + 1)
    trace = TraceFile(spec.run_dir / TRACE_FILE, asyncio.get_running_loop().time)
    telemetry = _make_telemetry(spec)
    made = make_ports(spec, segments_needed(ledger))
    scores = EvaluationFiles(spec.run_dir)
    ports = Ports(
        prompts=prompts,
        rollouts=made.rollouts,
        generators=made.generators,
        trainer=made.trainer,
        journal=journal,
        telemetry=telemetry,
        trace=trace,
        payloads=made.spool,
        evaluation=evaluation,
        scores=scores,
        cpu_s=made.cpu_s,
        failpoints=made.failpoints,
    )
    controller = _make_controller(spec, fence, ports, ledger)
    made.rollouts.report_joined(partial(controller.state.joined, Component.WORKER))
    made.rollouts.report_lost(controller.state.worker_lost)
    made.rollouts.report_to(controller.state.worker_reported)
    return ControllerHost(
        controller,
        run_id=spec.run_id,
        run_dir=spec.run_dir,
        journal=journal,
        telemetry=telemetry,
        trace=trace,
        spool=made.spool,
        scores=scores,
        redactor=Redactor.from_environment(config=spec.config),
    )


def _make_controller(spec: RunSpec, fence: Fence, ports: Ports, ledger: Ledger) -> Controller:
    config = spec.config
    return Controller(
        config,
        fence,
        ports,
        sampler=_make_sampler(spec),
        advantages=_make_advantages(spec),
        advantages_within_s=ADVANTAGE_S if config.algorithm.advantage_target else None,
        loss=LossSpec.of(config),
        max_group_bytes=max_group_bytes(config),
        rng=random.Random(config.seed),
        ledger=ledger,
        driver=spec.driver,
        evaluates_only=spec.evaluates_only,
        spares_prompts=spec.spares_prompts,
    )


def _make_telemetry(spec: RunSpec) -> Telemetry:
    config = spec.config
    run = TrackedRun(
        spec.run_id,
        config.name,
        spec.run_dir,
        yaml.safe_load(to_yaml(config, os.environ)),
        config.groups_per_step * config.samples_per_group,
        spec.working_dir,
    )
    return run_telemetry(config, run)


def _read_prompts(spec: RunSpec) -> tuple[PromptSource, dict[str, PromptSource]]:
    prompts = NoPrompts() if spec.evaluates_only else _read_training_prompts(spec)
    sets = make_evaluation_sets(spec.config, spec.inputs, spec.working_dir)
    check_held_out(spec.config, prompts, sets)
    return prompts, sets


def _read_training_prompts(spec: RunSpec) -> PromptSource:
    """Read and verify the run's prompts. A restarted controller reads them again."""
    prompts = make_prompts(spec.config, spec.inputs, spec.working_dir)
    sources: Mapping[str, PromptSource] = {"": prompts}
    if isinstance(prompts, MixedPrompts):
        sources = {name: each.source for name, each in prompts.sources.items()}
    for name, each in sources.items():
        key = key_in(name, DATA)
        if isinstance(each, FilePrompts) and key not in spec.inputs:
            record_input(spec.run_dir, key, each.digest)  # the driver could not read it
    return prompts


def _make_sampler(spec: RunSpec) -> Sampler:
    unpack(spec.other_values)
    config, key = spec.config.sampler, SAMPLER
    if target := targets(spec.config).get(key):
        check_same(key, target, source_digest(target, spec.working_dir), spec.inputs)
    return build_sampler(config, spec.config.groups_per_step, spec.working_dir)


def _make_advantages(spec: RunSpec) -> AdvantageEstimator:
    unpack(spec.other_values)
    if target := spec.config.algorithm.advantage_target:
        check_same(ADVANTAGE, target, source_digest(target, spec.working_dir), spec.inputs)
    return load_estimator(spec.config.algorithm, spec.working_dir)


async def _read_journal(spec: RunSpec) -> tuple[Ledger, FileJournal]:
    """Read the journal in a thread, so that the driver gets replies even if the disk is slow."""
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
    ledger, journal = await _call_in_thread(opening, what, READ_JOURNAL_S)
    took_s = round(loop.time() - began_at, 3)
    log.info("journal.read", incarnation=ledger.incarnation, took_s=took_s)
    return ledger, journal


async def _call_in_thread(call: Callable[[], T], what: str, within_s: float) -> T:
    """Call in a thread, so that this process answers even if a disk is slow.

    Raises:
        DeadlineExceeded: ``what`` was not read in time.
    """
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.get_running_loop().run_in_executor(None, call)
    except TimeoutError as late:
        raise DeadlineExceeded("start of the controller", what, within_s) from late


def engine_specs(spec: RunSpec) -> Iterator[EngineSpec]:
    """Yield the specs of all engines. A run on demonstrations has none."""
    config = spec.config
    if config.generator.backend == "none":
        return
    for index in range(config.generator.engines):
        yield EngineSpec(
            name=f"generator-{index}",
            model=_make_served_model(config),
            generator=config.generator,
            stub=config.stub,
            seed=config.seed + index,
            run_dir=str(spec.run_dir),
            sharing=spec.sharing,
            quantize=config.sync.quantize,
            keeps_base=config.sync.delta,
        )


def _make_served_model(config: RunConfig) -> ModelConfig:
    """Return the model as engines load it, in the dtype of the sent weights."""
    wire = config.sync.wire_dtype
    return config.model.model_copy(update={"dtype": wire}) if wire else config.model


def trainer_specs(spec: RunSpec) -> Iterator[TrainerSpec]:
    """Yield the specs of all trainer ranks. One stub represents all of them."""
    ranks = len(trainer_resources(spec.config))
    for rank in range(ranks):
        yield TrainerSpec(
            spec.config,
            str(spec.run_dir),
            rank,
            ranks,
            spec.sharing,
            working_dir=str(spec.working_dir),
            inputs=spec.inputs,
            values=spec.loss_values,
        )


def environment_specs(spec: RunSpec, engines: Mapping[str, str]) -> Iterator[EnvironmentSpec]:
    """Yield the specs of all environment workers.

    ``engines`` are the names of the engines' actors, or empty if engines are in the same process.
    """
    for index in range(environment_workers(spec.config)):
        yield EnvironmentSpec(
            name=f"environment-{index}",
            config=spec.config,
            working_dir=str(spec.working_dir),
            run_dir=str(spec.run_dir),
            engines=engines,
            sharing=spec.sharing,
            inputs=spec.inputs,
            tokenizer=chosen_class(spec.config),
            values=spec.other_values,
        )
