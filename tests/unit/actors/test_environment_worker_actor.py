"""An environment worker as an actor, in this process."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from transformers import PreTrainedTokenizerFast

from offbeat.actors.call_batching import BatchedReply, CallBatcher, Exchange
from offbeat.actors.environment_worker_actor import EnvironmentActor, EnvironmentSpec
from offbeat.config.run import RunConfig
from offbeat.environments.arithmetic import Arithmetic
from offbeat.environments.factory import BadEnvironment
from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.killable import RewardTarget
from offbeat.environments.protocol import Environment, SingleTurn
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.rollouts.response_text import TextlessTokens
from tests.support.agent_endpoint import CHATML, DrawnBytes, byte_tokenizer
from tests.support.environment_fakes import CharTokenizer, answers, task
from tests.support.own_logging import own_logging

REWARDS = Path(__file__).parents[1] / "environments"
AGENTS = Path(__file__).parents[1] / "endpoint"
CONFIG = RunConfig.model_validate(
    {"steps": 1, "model": {"path": "none"}, "environment": {"name": "stub"}}
)

_own_logging = pytest.fixture(autouse=True)(own_logging)


class Worker(EnvironmentActor):
    """Of an environment made here, and an engine that answers at once."""

    def __init__(
        self,
        run_dir: Path,
        environment: Environment,
        tokenizer: CharTokenizer | None = None,
        said: str = "hang",
    ) -> None:
        folder = str(run_dir)
        super().__init__(EnvironmentSpec("environment-0", CONFIG, folder, folder, {}))
        runner = self._environments[""]
        runner = replace(runner, environment=environment, tokenizer=tokenizer)
        textless = TextlessTokens(tokenizer) if tokenizer else None
        self._environments = {"": replace(runner, textless=textless)}
        self._engines = {"engine-0": CallBatcher(exchange_of("7", said))}


def exchange_of(*texts: str) -> Exchange[GenerateRequest, GenerateResult]:
    async def exchange(
        asked: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int],
    ) -> list[BatchedReply[GenerateResult]]:
        return [BatchedReply(id_, await answers(*texts)(request)) for id_, request in asked]

    return exchange


class Hanging(FunctionReward):
    """Its rewards take for ever; ``asked`` is set when one is."""

    def __init__(self) -> None:
        target = RewardTarget(
            "user_rewards:hangs", REWARDS, {}, memory_mib=2048, deadline_s=60.0, start_s=120.0
        )
        super().__init__(CharTokenizer(), target, workers=1)
        self.asked = asyncio.Event()

    async def score(
        self, task: RolloutTask, result: GenerateResult
    ) -> Sequence[float | NamedRewards]:
        self.asked.set()
        return await super().score(task, result)


def test_a_worker_may_be_closed_while_a_reward_is_computed(tmp_path: Path) -> None:
    async def main() -> None:
        environment = Hanging()
        worker: Any = Worker(tmp_path, environment)  # Ray's marks: methods are remote to a checker
        rollout = asyncio.ensure_future(worker.exchange(Fence("run", 1), [(0, task())], []))
        asked = asyncio.ensure_future(environment.asked.wait())
        await asyncio.wait([rollout, asked], return_when=asyncio.FIRST_COMPLETED)
        assert asked.done(), rollout.result()
        await worker.close()
        (report, answers), columns = await rollout
        assert (report.incarnation, answers, columns) == ((await worker.ping()).incarnation, [], [])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("evaluation", [True, False])
def test_only_the_responses_of_an_evaluation_are_sent_as_text(
    tmp_path: Path, evaluation: bool
) -> None:
    async def main() -> None:
        tokenizer = CharTokenizer()
        worker: Any = Worker(tmp_path, Arithmetic(tokenizer), tokenizer)
        a_task = msgspec.structs.replace(task(), evaluation=evaluation)
        (_, (reply,)), _ = await worker.exchange(Fence("run", 1), [(0, a_task)], [])
        assert reply.value.texts == (("7</s>", "hang</s>") if evaluation else ())
        await worker.close()

    asyncio.run(main())


def test_trained_tokens_that_the_tokenizer_does_not_have_are_counted(tmp_path: Path) -> None:
    async def main() -> None:
        tokenizer = CharTokenizer()
        worker: Any = Worker(tmp_path, Arithmetic(tokenizer), tokenizer, said="\x80\x81x")
        with capture_logs() as logs:
            for call in range(2):
                (_, (reply,)), _ = await worker.exchange(Fence("run", 1), [(call, task())], [])
                assert reply.failure is None, reply.failure
                assert reply.value.textless_tokens == 2
        [warning] = [entry for entry in logs if entry["event"] == "rollout.tokens_without_text"]
        assert (warning["tokens"], warning["of"]) == (2, 6)
        await worker.close()

    asyncio.run(main())


def test_a_worker_reports_the_cpu_seconds_of_its_process(tmp_path: Path) -> None:
    async def main() -> None:
        worker: Any = Worker(tmp_path, Arithmetic(CharTokenizer()), CharTokenizer())
        before_s = (await worker.ping()).cpu_s
        await worker.exchange(Fence("run", 1), [(0, task())], [])
        assert (await worker.close()).cpu_s > before_s > 0

    asyncio.run(main())


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
def test_an_environment_that_exits_fails_its_group_by_name_and_the_worker_goes_on(
    tmp_path: Path, where: str
) -> None:
    async def main() -> None:
        environment = Exiting(where)
        worker: Any = Worker(tmp_path, environment)
        (_, (reply,)), _ = await worker.exchange(Fence("run", 1), [(0, task())], [])
        assert "SystemExit: 2" in str(reply.failure)
        environment.where = "nowhere"
        if where != "start":
            (_, (reply,)), _ = await worker.exchange(Fence("run", 1), [(1, task())], [])
            assert reply.failure is None
        await worker.close()

    asyncio.run(main())


class AgentWorker(EnvironmentActor):
    """Of an agent, on an engine that draws bytes."""

    def __init__(self, run_dir: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.save_pretrained(run_dir / "model")
        folder = str(run_dir)
        section = {"name": "agent", "target": "user_agents:converses"}
        config = RunConfig.model_validate(
            {
                "steps": 1,
                "model": {"path": str(run_dir / "model")},
                "environment": section,
                "data": {"path": "tasks.jsonl"},
                "generator": {"max_model_len": 4000, "sampling": {"max_new_tokens": 20}},
            }
        )
        super().__init__(EnvironmentSpec("environment-0", config, str(AGENTS), folder, {}))
        self._engines = {"engine-0": CallBatcher(self._drawn)}
        self.engine = DrawnBytes()

    async def _drawn(
        self,
        asked: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int],
    ) -> list[BatchedReply[GenerateResult]]:
        return [BatchedReply(id_, await self.engine.generate(request)) for id_, request in asked]


def test_a_worker_plays_an_agent_and_closes_its_endpoint_and_its_processes(tmp_path: Path) -> None:
    async def main() -> None:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = CHATML
        worker: Any = AgentWorker(tmp_path, tokenizer)
        one = task({"question": "how many"}, samples=3)
        (_, (reply,)), (columns,) = await worker.exchange(Fence("run", 1), [(0, one)], [])
        assert (reply.failure, reply.value.turns) == (None, (2, 2, 2))
        assert int(columns["loss_mask"].sum()) == sum(len(ids) for _, ids, _ in worker.engine.calls)
        await worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_an_agent_needs_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="needs a tokenizer with a chat template"):
        AgentWorker(tmp_path, byte_tokenizer())
