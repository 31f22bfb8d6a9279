"""Makes the parts of a run in this process, and their ports.

Also measures the CPU seconds of threads that share a process.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from offbeat.config.engine_plugin import find_engine
from offbeat.config.limits import shares_weights
from offbeat.controller.failpoints import Failpoints, no_failpoints
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.rows import RowGenerator
from offbeat.generators.spec import EngineSpec
from offbeat.launch.run_parts import (
    MadePorts,
    RunSpec,
    engine_specs,
    environment_specs,
    trainer_specs,
)
from offbeat.local.hosted import Hosted
from offbeat.local.ports import (
    LocalGenerator,
    LocalRollouts,
    LocalSpool,
    LocalTrainer,
    UnpublishedLocalTrainer,
)
from offbeat.local.threads import LoopThread, WorkThread
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.rollouts.worker import EnvironmentSpec, EnvironmentWorker
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.no_trainer import NoTrainer
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.spool import FOLDER
from offbeat.weight_sync.served import ServedWeights


class CpuClocks:
    """CPU seconds of threads that report their time. The rest counts as the controller's."""

    def __init__(self, process_s: Callable[[], float] = time.process_time) -> None:
        """Create the clocks. ``process_s`` returns the CPU seconds of the whole process."""
        self._process_s = process_s
        self._threads = list[Callable[[], float]]()
        self._lock = threading.Lock()

    def make_clock(self, thread: threading.Thread) -> Callable[[], float]:
        """Return a clock of a running thread's CPU seconds. Any thread may read it.

        The clock stops once the thread has ended.
        """
        identity = thread.ident
        if identity is None:
            raise RuntimeError(f"thread {thread.name} has not started")
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS: its time counts as the controller's
            return lambda: 0.0
        clock_id, last_s = time.pthread_getcpuclockid(identity), 0.0

        def read() -> float:
            nonlocal last_s
            with contextlib.suppress(OSError):  # the thread has ended
                last_s = time.clock_gettime(clock_id)
            return last_s

        with self._lock:
            self._threads.append(read)
        return read

    def rest_s(self) -> float:
        """Return the CPU seconds of the process, without threads that have a clock."""
        with self._lock:
            hosted_s = sum(read() for read in self._threads)
        return self._process_s() - hosted_s


def make_rank(spec: TrainerSpec, cpu: CpuClocks, thread: WorkThread) -> TrainerRank:
    """Create the trainer's rank in its thread."""
    clock, place = cpu.make_clock(thread.thread), WriteLocation(Path(spec.run_dir))
    if spec.config.trainer.backend == "stub":
        from offbeat.fakes.trainer import make_stub_rank  # noqa: PLC0415 -- no torch

        return TrainerRank(spec, partial(make_stub_rank, spec), place, _no_address, cpu_clock=clock)
    import torch  # noqa: PLC0415 -- a dry run goes without

    from offbeat.local.shared_weights import SharedRank  # noqa: PLC0415
    from offbeat.trainers.torch.torch_trainer import make_torch_rank  # noqa: PLC0415

    torch.set_num_threads(spec.config.trainer.threads)  # for this thread
    if shares_weights(spec.config):
        return SharedRank(spec, place, _no_address, cpu_clock=clock)
    return TrainerRank(spec, partial(make_torch_rank, spec), place, _no_address, cpu_clock=clock)


def make_engine(spec: EngineSpec, cpu: CpuClocks, thread: WorkThread) -> EngineServer:
    """Create an engine in the thread that runs its steps."""
    clock = cpu.make_clock(thread.thread)
    if spec.generator.backend == "stub":
        from offbeat.fakes.engine_server import StubEngineServer  # noqa: PLC0415 -- no torch

        return StubEngineServer(spec, cpu_clock=clock)
    if (plugin := find_engine(spec.generator.backend)) is not None:
        return plugin.server_class()(spec, steps_in=thread, cpu_clock=clock)
    from offbeat.generators.embedded.server import EmbeddedEngineServer  # noqa: PLC0415

    return EmbeddedEngineServer(spec, steps_in=thread, cpu_clock=clock)


def make_shared_engine(
    spec: EngineSpec, trainer: Hosted[TrainerRank], cpu: CpuClocks, thread: WorkThread
) -> EngineServer:
    """Create an engine that computes with the trainer's tensors, in the thread that runs it."""
    from offbeat.local.shared_weights import start_shared_engine  # noqa: PLC0415 -- torch

    return start_shared_engine(spec, trainer, thread, cpu.make_clock(thread.thread))


def make_worker(
    spec: EnvironmentSpec, generators: Mapping[str, LocalGenerator], thread: WorkThread
) -> EnvironmentWorker:
    """Create the environment worker, which sends its requests to these engines."""
    del thread  # the worker runs on the loop of the rollouts

    def generate(engine: str, request: GenerateRequest) -> Awaitable[GenerateResult]:
        return generators[engine].generate(request)

    place = WriteLocation(Path(spec.run_dir))
    return EnvironmentWorker(spec, place, generate, cpu_clock=time.thread_time)


def _no_address() -> str:
    raise RuntimeError("a run in one process listens on no address")


@dataclass(frozen=True, slots=True)
class Makers:
    """Functions that make the parts. A test replaces one to inject faults."""

    rank: Callable[[TrainerSpec, CpuClocks, WorkThread], TrainerRank] = make_rank
    engine: Callable[[EngineSpec, CpuClocks, WorkThread], EngineServer] = make_engine
    shared_engine: Callable[
        [EngineSpec, Hosted[TrainerRank], CpuClocks, WorkThread], EngineServer
    ] = make_shared_engine
    worker: Callable[
        [EnvironmentSpec, Mapping[str, LocalGenerator], WorkThread], EnvironmentWorker
    ] = make_worker
    failpoints: Failpoints = no_failpoints


class LocalParts:
    """The parts of one run and their threads."""

    def __init__(self, makers: Makers) -> None:
        self._makers = makers
        self.loop = LoopThread("rollouts")
        self.generators = dict[str, LocalGenerator]()
        self._ports: MadePorts | None = None
        self._cpu = CpuClocks()
        self._cpu.make_clock(self.loop.thread)

    def make_ports(self, spec: RunSpec, needed: Iterable[str]) -> MadePorts:
        """Create the ports of a run. ``needed`` are the spool segments to keep."""
        trainer = None if spec.evaluates_only else self._host_trainer(spec)
        for each in engine_specs(spec):
            hosted = self._host_engine(spec, each, trainer)
            self.generators[each.name] = LocalGenerator(hosted, self.loop)
        keeps = spec.config.transfer_queue.spool == "keep"
        spool = LocalSpool(spec.run_dir / FOLDER, needed, keeps_all=keeps)
        (worker,) = environment_specs(spec, {})
        made = partial(self._makers.worker, worker, self.generators)
        rows = RowGenerator()
        self._ports = MadePorts(
            trainer=self._make_trainer_port(spec, trainer),
            generators=self.generators or {rows.name: rows},
            rollouts=LocalRollouts(Hosted(worker.name, made), self.loop, spool.hold),
            spool=spool,
            cpu_s=self._cpu.rest_s,
            failpoints=self._makers.failpoints,
        )
        return self._ports

    def ask_engines(self) -> dict[str, Future[ServedWeights]]:
        """Ask every engine which weights it serves, for ``offbeat verify-weights``."""
        return {name: each.ask_served() for name, each in self.generators.copy().items()}

    async def close(self, within_s: float) -> None:
        """Close the parts that the controller has not closed, or abandon them after ``within_s``."""
        if self._ports is None:
            return
        ports = self._ports.rollouts, *self.generators.values(), self._ports.trainer
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(each.close() for each in ports), return_exceptions=True)

    def _host_trainer(self, spec: RunSpec) -> Hosted[TrainerRank]:
        (rank,) = trainer_specs(spec)
        return Hosted(rank.process, partial(self._makers.rank, rank, self._cpu))

    def _host_engine(
        self, run: RunSpec, spec: EngineSpec, trainer: Hosted[TrainerRank] | None
    ) -> Hosted[EngineServer]:
        if trainer is None or not shares_weights(run.config):
            return Hosted(spec.name, partial(self._makers.engine, spec, self._cpu))
        make = partial(self._makers.shared_engine, spec, trainer, self._cpu)
        return Hosted(
            spec.name, make, lock=contextlib.nullcontext()
        )  # it waits for the trainer first

    def _make_trainer_port(
        self, spec: RunSpec, trainer: Hosted[TrainerRank] | None
    ) -> NoTrainer | LocalTrainer:
        if trainer is None:
            return NoTrainer(spec.config.model.path)
        kind = LocalTrainer if spec.config.generator.has_engines else UnpublishedLocalTrainer
        return kind(trainer)
