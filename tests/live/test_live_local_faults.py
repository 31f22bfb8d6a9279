"""Failures inside of a run in one process: at every port, and of the process at every crash point."""

import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crash_at import CRASHED
from local_runs import run_locally

from offbeat.controller.failpoints import Failpoint
from offbeat.fakes.engine_server import StubEngineServer
from offbeat.fakes.trainer import make_stub_rank
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.local.parts import CpuClocks, Makers, make_worker
from offbeat.local.ports import LocalGenerator
from offbeat.local.threads import WorkThread
from offbeat.messages.failures import EngineUnavailable, TrainerCall, TrainStepFailed
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.training import ChunkResult, StepResult
from offbeat.messages.weights import EngineState
from offbeat.rollouts.worker import EnvironmentSpec, EnvironmentWorker
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from tests.support.live_run import offbeat
from tests.support.no_address import no_address
from tests.support.own_logging import own_logging
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, STUB, make_start
from tests.support.warm_commands import warm_commands

STEPS = 12
QUICK = (f"steps={STEPS}", "stub.median_rollout_s=0.01", "stub.step_s=0.01")


@pytest.fixture(autouse=True)
def logging_of_the_tests() -> Iterator[None]:
    yield from own_logging()


def check_complete(records: RunRecords) -> None:
    """Check that a run reached its end, and that it lost and repeated nothing."""
    records.agree()
    records.no_token_is_from_the_future()
    summary = records.summary
    assert (summary.outcome, summary.trainer_version) == ("finished", STEPS)
    assert summary.groups.trained == summary.groups.drawn == 4 * STEPS
    assert summary.max_staleness_trained <= 1


# --- a part that fails ----------------------------------------------------------------------------


class BreakingEngine(StubEngineServer):
    """An engine that breaks for good at a request, unless another one has done so before."""

    broken = False

    def __init__(self, spec: EngineSpec, breaks_at: Iterator[int]) -> None:
        super().__init__(spec)
        self._left = next(breaks_at, 0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._left -= 1
        self.broken = self.broken or self._left == 0
        self._check()
        return await super().generate(request)

    async def state(self, fence: Fence) -> EngineState:
        self._check()
        return await super().state(fence)

    def _check(self) -> None:
        if self.broken:
            raise EngineUnavailable(self._name, "answer", "a step raised", "Start another engine")


def test_an_engine_that_breaks_is_replaced_and_its_groups_are_sampled_again(tmp_path: Path) -> None:
    breaks_at = iter([10])

    def make(spec: EngineSpec, cpu: CpuClocks, thread: WorkThread) -> EngineServer:
        return BreakingEngine(spec, breaks_at)

    records = run_locally(tmp_path / "run", Makers(engine=make), QUICK)
    check_complete(records)
    assert records.summary.restarts == 1


class FailingRank(TrainerRank):
    """A rank whose fault is called before each of its calls of a step, by the call's name."""

    def __init__(self, spec: TrainerSpec, fault: Callable[[TrainerCall], None]) -> None:
        place = WriteLocation(Path(spec.run_dir))
        super().__init__(spec, partial(make_stub_rank, spec), place, no_address)
        self._fault = fault

    def train_microbatch(self, *args: Any) -> ChunkResult:
        self._fault(TrainerCall.MICROBATCH)
        return super().train_microbatch(*args)

    def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        self._fault(TrainerCall.FINISH)
        return super().finish_train_step(fence, key)


def run_with_rank(
    run_dir: Path, fault: Callable[[TrainerCall], None], *overrides: str
) -> RunRecords:
    def make(spec: TrainerSpec, cpu: CpuClocks, thread: WorkThread) -> TrainerRank:
        return FailingRank(spec, fault)

    return run_locally(run_dir, Makers(rank=make), [*QUICK, *overrides])


def once(at: TrainerCall, nth: int, act: Callable[[], object]) -> Callable[[TrainerCall], None]:
    """Return a fault that acts at the nth call of one kind."""
    left = nth

    def fault(call: TrainerCall) -> None:
        nonlocal left
        left -= call == at
        if call == at and left == 0:
            act()

    return fault


def fail(call: TrainerCall) -> None:
    raise TrainStepFailed(0, 1, call, "planted")


def test_a_step_that_fails_is_aborted_and_tried_again(tmp_path: Path) -> None:
    records = run_with_rank(
        tmp_path / "run", once(TrainerCall.MICROBATCH, 5, partial(fail, TrainerCall.MICROBATCH))
    )
    check_complete(records)
    assert records.summary.trainer_restarts == 0


def test_a_trainer_that_fails_in_finish_is_replaced_and_rewound(tmp_path: Path) -> None:
    fault = once(TrainerCall.FINISH, 6, partial(fail, TrainerCall.FINISH))
    records = run_with_rank(tmp_path / "run", fault, "checkpoint.interval=2")
    check_complete(records)
    assert records.summary.trainer_restarts == 1


def test_a_trainer_that_hangs_is_abandoned_and_the_process_goes_on_without_it(
    tmp_path: Path,
) -> None:
    free = threading.Event()
    fault = once(TrainerCall.MICROBATCH, 6, free.wait)
    deadlines = ("trainer.step_deadline_s=2", "checkpoint.interval=2")
    try:
        records = run_with_rank(tmp_path / "run", fault, *deadlines)
        check_complete(records)
        assert records.summary.trainer_restarts == 1
    finally:
        free.set()


def test_a_bug_in_an_environment_ends_the_run_with_its_place(tmp_path: Path) -> None:
    def make(
        spec: EnvironmentSpec, generators: Mapping[str, LocalGenerator], thread: WorkThread
    ) -> EnvironmentWorker:
        worker = make_worker(spec, generators, thread)
        worker._environments = {}  # noqa: SLF001 -- the bug
        return worker

    records = run_locally(tmp_path / "run", Makers(worker=make), QUICK)
    assert records.summary.outcome == "failed"
    assert records.summary.error is not None and "KeyError" in records.summary.error
    assert "test_live_local_faults" not in records.summary.error


# --- a process that ends --------------------------------------------------------------------------

SHORT = (Failpoint.DISPATCHED, Failpoint.INTENT_DURABLE, Failpoint.FINISH_ANSWERED)
NEVER_IN_A_QUIET_RUN = (Failpoint.ABORTING, Failpoint.REWINDING, Failpoint.UNDOING)
LATER = (Failpoint.REWOUND, Failpoint.RECOVERED)  # after a restart only


@pytest.mark.parametrize(
    "point",
    [
        each if each in SHORT else pytest.param(each, marks=pytest.mark.long)
        for each in Failpoint
        if each not in (*NEVER_IN_A_QUIET_RUN, *LATER)
    ],
)
def test_a_process_that_ends_at_a_crash_point_is_resumed_without_a_loss(
    tmp_path: Path, point: Failpoint
) -> None:
    run_dir = tmp_path / "run"
    settings = [*QUICK, "runtime=local", "checkpoint.interval=2", "wandb.mode=disabled"]
    given = (point.value, 3, run_dir, STUB, *settings)
    crashed = warm_commands().run(ROOT, *given, program="tests.live.crash_at")
    assert crashed.returncode == CRASHED, crashed.stderr
    code, text = offbeat("train", "--resume", run_dir)
    assert code == 0, text
    check_complete(RunRecords.read(run_dir))
    code, text = offbeat("replay", run_dir)
    assert code == 0, text


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_random_moments_loses_nothing(tmp_path: Path, kills: int) -> None:
    draw, steps = random.Random(kills), 4 * kills + 4
    start = make_start(tmp_path, "local", is_warm=True)
    settings = (f"steps={steps}", "stub.step_s=0.05", "checkpoint.interval=3")
    run_dir = tmp_path / "run"
    for kill in range(kills):
        how = (STUB, *settings) if not kill else (None, "--resume", str(run_dir))
        with start("run", *how) as run:
            target = min(steps - 2, draw.randint(1, 4) + run.steps_so_far)
            run.until("it trains", lambda at=target, run=run: run.steps_so_far >= at)
            run.interrupt(signal.SIGKILL)
            assert run.exit_code(within_s=90) == -signal.SIGKILL
    with start("run", None, "--resume", str(run_dir)) as last:
        assert last.exit_code() == 0
        last.nothing_is_left()
    records = RunRecords.read(run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    summary = records.summary
    assert (summary.outcome, summary.trainer_version) == ("finished", steps)
    assert summary.groups.trained == summary.groups.drawn == 4 * steps
    code, text = offbeat("replay", run_dir)
    assert code == 0, text
