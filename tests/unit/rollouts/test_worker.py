"""An environment worker without Ray: its engines are functions of this process."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import SamplingConfig
from offbeat.environments.built_in import Arithmetic, StubEnvironment
from offbeat.environments.protocol import SingleTurn
from offbeat.messages.failures import (
    ActorLost,
    ArgumentLost,
    Component,
    EngineUnavailable,
    FailureKind,
    InvalidRequest,
    RemoteBug,
    RolloutFailed,
    StaleFence,
)
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.rollouts.worker import EnvironmentRunner
from tests.support.environment_fakes import CharTokenizer, answers, task
from tests.support.environment_workers import WorkerOf, only

pytestmark = pytest.mark.real_clock

FENCE = Fence("run", 1)


def test_a_process_that_runs_a_worker_needs_no_ray() -> None:
    script = (
        "import sys\n"
        "sys.modules['ray'] = None\n"  # an import of it raises
        "import offbeat.rollouts.worker\n"
        "print(*({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout.split()) == (0, []), ended.stderr


@pytest.mark.parametrize("evaluation", [True, False])
async def test_only_the_responses_of_an_evaluation_are_sent_as_text(
    tmp_path: Path, evaluation: bool
) -> None:
    tokenizer = CharTokenizer()
    worker = WorkerOf(tmp_path, Arithmetic(tokenizer), tokenizer)
    worker.admit(FENCE)
    receipt, _ = await worker.roll_out(msgspec.structs.replace(task(), evaluation=evaluation))
    assert receipt.texts == (("7</s>", "hang</s>") if evaluation else ())
    await worker.close()


async def test_the_log_has_what_a_sample_said_and_the_advantage_that_it_is_trained_with(
    tmp_path: Path,
) -> None:
    tokenizer = CharTokenizer()
    worker = WorkerOf(tmp_path, Arithmetic(tokenizer), tokenizer)
    worker.admit(FENCE)
    await worker.roll_out(task())
    await worker.close()
    (path,) = (tmp_path / "rollouts").glob("*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert [row["response"] for row in rows] == ["7</s>", "hang</s>"]
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert [row["advantage"] for row in rows] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


async def test_trained_tokens_that_the_tokenizer_does_not_have_are_counted(tmp_path: Path) -> None:
    tokenizer = CharTokenizer()
    generate = only(answers("7", "\x80\x81x"))
    worker = WorkerOf(tmp_path, Arithmetic(tokenizer), tokenizer, generate)
    worker.admit(FENCE)
    with capture_logs() as logs:
        for _ in range(2):
            receipt, _ = await worker.roll_out(task())
            assert receipt.textless_tokens == 2
    [warning] = [entry for entry in logs if entry["event"] == "rollout.tokens_without_text"]
    assert (warning["tokens"], warning["of"]) == (2, 6)
    await worker.close()


async def test_a_late_group_is_a_strike_unless_its_engine_has_just_answered_another(
    tmp_path: Path,
) -> None:
    async def answer_other_groups(request: GenerateRequest) -> GenerateResult:
        if request.prompt_ids == (ord("1"), ord("+"), ord("2"), ord("=")):
            await asyncio.get_running_loop().create_future()
        return await answers("7", "hang")(request)

    worker = WorkerOf(
        tmp_path, Arithmetic(CharTokenizer()), CharTokenizer(), only(answer_other_groups)
    )
    worker.admit(FENCE)
    late = msgspec.structs.replace(
        task(), deadline_s=0.5, prompt=Prompt(7, 0, 7, {"prompt": "1+2=", "answer": 3})
    )
    with pytest.raises(RolloutFailed) as alone:
        await worker.roll_out(late)
    assert (alone.value.reason, alone.value.source) == ("deadline", Component.ENGINE)
    running = asyncio.ensure_future(worker.roll_out(late))
    while not running.done():
        await worker.roll_out(task())
    with pytest.raises(RolloutFailed) as beside:
        await running
    assert (beside.value.kind, beside.value.reason) == (FailureKind.INFRASTRUCTURE, "deadline")
    assert beside.value.source is Component.WORKER
    assert beside.value.detail.endswith("engine-0 answers other requests")
    await worker.close()


async def test_a_worker_reports_the_cpu_seconds_of_its_process(tmp_path: Path) -> None:
    worker = WorkerOf(tmp_path, Arithmetic(CharTokenizer()), CharTokenizer())
    worker.admit(FENCE)
    before_s = worker.report().cpu_s
    await worker.roll_out(task())
    assert (await worker.close()).cpu_s > before_s > 0


async def test_a_worker_that_shares_its_process_reports_the_cpu_seconds_of_its_thread(
    tmp_path: Path,
) -> None:
    def burn_cpu() -> None:
        ends_at = time.process_time() + 0.05
        while time.process_time() < ends_at:
            pass

    worker = WorkerOf(tmp_path, StubEnvironment(), cpu_clock=time.thread_time)
    before_s = worker.report().cpu_s
    await asyncio.to_thread(burn_cpu)
    assert (await worker.close()).cpu_s - before_s < 0.05


async def test_a_replaced_controller_is_refused(tmp_path: Path) -> None:
    worker = WorkerOf(tmp_path, StubEnvironment())
    worker.admit(Fence("run", 2))
    with pytest.raises(StaleFence, match="environment-0 refuses a call with fence"):
        worker.admit(FENCE)
    await worker.close()


async def test_a_new_controller_gets_segments_of_the_spool_that_no_other_has(
    tmp_path: Path,
) -> None:
    worker = WorkerOf(tmp_path, StubEnvironment())
    segments = list[str]()
    for incarnation in (1, 1, 2):
        worker.admit(Fence("run", incarnation))
        receipt, _ = await worker.roll_out(task())
        assert receipt.spooled is not None
        segments.append(receipt.spooled.segment)
    await worker.close()
    first, same, other = segments
    assert first == same != other


async def test_a_request_reaches_the_engine_of_its_task_under_an_id_of_this_worker(
    tmp_path: Path,
) -> None:
    sent = list[tuple[str, str]]()

    async def generate(engine: str, request: GenerateRequest) -> GenerateResult:
        sent.append((engine, request.request_id))
        return await answers("7", "8")(request)

    worker = WorkerOf(tmp_path, StubEnvironment(), generate=generate)
    worker.admit(FENCE)
    await worker.roll_out(task())
    await worker.roll_out(msgspec.structs.replace(task(), engine="engine-3"))
    await worker.close()
    assert [engine for engine, _ in sent] == ["engine-0", "engine-3"]
    assert len({id_ for _, id_ in sent}) == 2
    assert all(id_.startswith(worker.report().incarnation) for _, id_ in sent)


@pytest.mark.parametrize(
    ("raised", "kind", "reason"),
    [
        (ActorLost("engine-0", "generate", "gone"), FailureKind.INFRASTRUCTURE, "engine_lost"),
        (
            ArgumentLost("engine-0", "generate", "gone", "id"),
            FailureKind.INFRASTRUCTURE,
            "engine_lost",
        ),
        (
            EngineUnavailable("engine-0", "generate", "it is closed", "None."),
            FailureKind.INFRASTRUCTURE,
            "engine_unavailable",
        ),
        (InvalidRequest("a", "too long", "Cut it."), FailureKind.DATA, "invalid_request"),
        (RemoteBug("engine-0", "generate", "KeyError", "'x'"), FailureKind.BUG, "engine_raised"),
        (KeyError("x"), FailureKind.BUG, "KeyError"),
    ],
)
async def test_an_error_of_an_engine_is_classified_by_whether_a_retry_may_help(
    tmp_path: Path, raised: Exception, kind: FailureKind, reason: str
) -> None:
    async def generate(engine: str, request: GenerateRequest) -> GenerateResult:
        raise raised

    worker = WorkerOf(tmp_path, StubEnvironment(), generate=generate)
    worker.admit(FENCE)
    with pytest.raises(RolloutFailed) as failed:
        await worker.roll_out(task())
    failure = failed.value
    assert (failure.kind, failure.reason) == (kind, reason)
    assert (failure.prompt_index, failure.attempt) == (7, 1)
    assert failure.__cause__ is raised
    await worker.close()


class Exiting(SingleTurn):
    """Exits where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _reach(self, here: str) -> None:
        if self.where == here:
            sys.exit(2)

    async def start(self) -> None:
        self._reach("start")

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        self._reach("encode")
        return (1,)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        self._reach("score")
        await asyncio.gather(self._in_a_task())
        return [1.0] * task.samples

    async def _in_a_task(self) -> None:
        self._reach("a task of its own")


@pytest.mark.parametrize("where", ["start", "encode", "score", "a task of its own"])
async def test_an_environment_that_exits_fails_its_group_by_name_and_the_worker_goes_on(
    tmp_path: Path, where: str
) -> None:
    environment = Exiting(where)
    worker = WorkerOf(tmp_path, environment)
    worker.admit(FENCE)
    with pytest.raises(RolloutFailed, match="SystemExit: 2"):
        await worker.roll_out(task())
    environment.where = "nowhere"
    if where != "start":
        await worker.roll_out(task())
    await worker.close()


def test_every_sampling_key_of_the_recipe_is_in_the_requests(tmp_path: Path) -> None:
    sampling = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "max_new_tokens": 7,
        "stop_token_ids": [5],
        "stop": ["</answer>"],
    }
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": "none"},
            "environment": {"name": "stub"},
            "generator": {"sampling": sampling},
        }
    )
    assert set(sampling) == set(SamplingConfig.model_fields)
    runner = EnvironmentRunner.make(config, tmp_path, {})
    sent = msgspec.json.decode(msgspec.json.encode(runner.sampling))
    assert sent == {**sampling, "seed": None}
