"""Groups of an agent: real processes, HTTP, a fake engine; what becomes of each episode."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.killable import RewardFailed
from offbeat.messages.failures import ActorLost, Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, SampleFailure, SampleStatus
from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups
from offbeat.plugins.agents.endpoint.session import SessionLimits
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import EngineClient, Generate
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.deadline import within_deadline
from offbeat.rollouts.samples import TOO_FEW, SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.agent_endpoint import DrawnBytes, started_groups

T = TypeVar("T")
HERE = Path(__file__).parent
MASK = SampleFailurePolicy("mask")
RETRY = SampleFailurePolicy("retry", sample_retries=1)
ROW = {"question": "how many"}
Rolled = tuple[Receipt, Columns]


def task(*, samples: int = 1, deadline_s: float = 60.0, evaluation: bool = False) -> RolloutTask:
    return RolloutTask(
        Prompt(7, 0, 7, ROW), 1, samples, "engine-0", 3, deadline_s, evaluation=evaluation
    )


async def with_agent(
    name: str,
    use: Callable[[AgentGroups], Awaitable[T]],
    workers: int = 1,
    limits: SessionLimits | None = None,
    deadline_s: float | None = None,
    **options: Any,
) -> T:
    recipe = EnvironmentConfig(
        name="agent",
        target=f"user_agents:{name}",
        options=options,
        reward_workers=workers,
        episode_deadline_s=deadline_s,
    )
    async with started_groups(make_agent(recipe, HERE), limits=limits) as groups:
        return await use(groups)


def client(of: RolloutTask, generate: Generate) -> EngineClient:
    return EngineClient(of, generate, SamplingParams(max_new_tokens=40), 4000)


def play(
    name: str,
    of: RolloutTask | None = None,
    generate: Generate | None = None,
    policy: SampleFailurePolicy = RETRY,
    **options: Any,
) -> Rolled:
    async def use(groups: AgentGroups) -> Rolled:
        one = client(of or task(), generate or DrawnBytes().generate)
        return await groups.run_group(one, policy)

    return asyncio.run(with_agent(name, use, **options))


def failure(name: str, *args: Any, **kwargs: Any) -> RolloutFailed:
    with pytest.raises(RolloutFailed) as caught:
        play(name, *args, **kwargs)
    return caught.value


# --- what is trained --------------------------------------------------------------------------------


def test_a_conversation_is_packed_as_the_engine_drew_it() -> None:
    engine = DrawnBytes(["5<|im_end|>", "6<|im_end|>"])
    receipt, columns = play("converses", generate=engine.generate)
    (_, first, first_logprobs), (request, second, second_logprobs) = engine.calls
    assert receipt.rewards == (4.0,)
    assert receipt.turns == (2,)
    assert (*columns[schema.PROMPT_IDS].tolist(), *columns[schema.RESPONSE_IDS].tolist()) == (
        *request.prompt_ids,
        *second,
    )
    mask = columns[schema.LOSS_MASK]
    assert columns[schema.RESPONSE_IDS][mask].tolist() == [*first, *second]
    assert columns[schema.GENERATION_LOGPROBS][mask].tolist() == [
        *first_logprobs,
        *second_logprobs,
    ]


def test_samples_may_open_with_other_messages() -> None:
    engine = DrawnBytes()
    receipt, columns = play("opens_differently", task(samples=3), engine.generate)
    prompt = columns[schema.PROMPT_IDS].tolist()
    offsets, ids = columns[schema.RESPONSE_OFFSETS], columns[schema.RESPONSE_IDS]
    packed = [prompt + ids[start:end].tolist() for start, end in pairwise(offsets)]
    assert sorted(packed) == sorted(
        [*request.prompt_ids, *said] for request, said, _ in engine.calls
    )
    assert len(prompt) < min(len(request.prompt_ids) for request, *_ in engine.calls)
    assert sum(receipt.valid_tokens) == sum(len(said) for _, said, _ in engine.calls)
    assert receipt.rewards == (0.5,) * 3


def test_rewards_by_name_are_recorded_beside_the_one_that_is_trained() -> None:
    receipt, columns = play("names_its_rewards", task(samples=2))
    assert receipt.rewards == (0.5, 0.5)
    assert receipt.rewards_by_name == (("style", (0.25, 0.25)), ("tool-calls", (3.0, 3.0)))
    assert columns[schema.REWARDS].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("answer", "recorded"), [("42", "42"), (None, ""), ("", "")])
def test_the_final_answer_of_an_agent_is_that_of_an_evaluations_sample(
    answer: object, recorded: str
) -> None:
    receipt, _ = play("names_its_answer", task(evaluation=True), answer=answer)
    assert (receipt.answers, receipt.rewards_by_name) == ((recorded,), ())
    receipt, _ = play("names_its_answer", task(), answer=answer)
    assert receipt.answers == ()  # of a group to train nobody asks


def test_a_sample_of_an_agent_without_an_answer_has_no_vote(tmp_path: Path) -> None:
    receipt, _ = play(
        "answers_first_time_only", task(samples=2, evaluation=True), folder=str(tmp_path)
    )
    assert sorted(receipt.answers) == ["", "7"]


def test_a_masked_sample_has_no_rewards_by_name(tmp_path: Path) -> None:
    receipt, _ = play("names_its_rewards", task(samples=2), policy=MASK, fails_at=str(tmp_path))
    named, at = dict(receipt.rewards_by_name), receipt.statuses.index(SampleStatus.MASKED)
    assert (named["style"][at], sum(filter(None, named["style"]))) == (0.0, 0.25)


def test_a_sample_without_a_metric_of_the_others_has_none_for_it(tmp_path: Path) -> None:
    receipt, _ = play("wins_once", task(samples=2), folder=str(tmp_path))
    named = {name: set(values) for name, values in receipt.rewards_by_name}
    assert named == {"won": {1.0, None}, "lost": {None}}
    assert receipt.masked_samples == 0


def test_a_group_with_ever_new_names_of_metrics_fails() -> None:
    told = failure("names_at_random", task(samples=33))
    assert (told.kind, told.reason) == (FailureKind.DATA, "reward_names_differ")
    assert "metrics of 33 names" in told.detail


# --- failures of one sample -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("raises", "agent_raised", "in raises: KeyError: 'tool'"),
        ("exits", "agent_process_died", "exit code 0"),
        ("raises_exit", "agent_raised", "SystemExit"),
        ("never_asks", "no_model_call", "requests count that go to client.base_url"),
        ("swallows_a_refusal", "no_model_call", "was refused: 400 context_length_exceeded"),
        ("returns_no_reward", "reward_wrong_type", "['style'] without 'reward'"),
        (
            "answers_in_numbers",
            "reward_wrong_type",
            "'answer' is int 42: it is the final answer, as",
        ),
        ("names_badly", "reward_wrong_type", "the agent named its rewards ['a/b', 'reward']"),
        ("returns_not_finite", "reward_not_finite", "the metric 'style' is inf"),
        ("returns_a_text", "reward_wrong_type", "the metric 'note' is str 'hello'"),
    ],
)
def test_what_an_agent_does_wrong_is_its_samples_failure(name: str, reason: str, says: str) -> None:
    told = failure(name)
    assert (told.kind, told.reason) == (FailureKind.DATA, TOO_FEW)
    assert f" ({reason}); 0 of 1" in told.detail and says in told.detail


def test_a_refusal_that_an_agent_swallows_is_counted_and_logged_once() -> None:
    with capture_logs() as logs:
        receipt, _ = play("goes_on_after_a_refusal", task(samples=2))
    assert (receipt.rewards, receipt.refused_requests) == ((0.25, 0.25), (1, 1))
    [warning] = [entry for entry in logs if entry["event"] == "agent.request_refused"]
    assert "temperature: 0.7 is asked for" in warning["refusal"]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("converses", SessionLimits(max_sample_tokens=60)),
        ("opens_branches", SessionLimits(max_branches=1)),
    ],
)
def test_a_sample_beyond_its_limits_is_refused_a_turn_and_fails_by_its_model(
    name: str, limits: SessionLimits
) -> None:
    engine = DrawnBytes()
    told = failure(name, generate=engine.generate, policy=MASK, limits=limits)
    assert (told.kind, told.reason) == (FailureKind.DATA, TOO_FEW)
    assert "(agent_raised)" in told.detail and "400" in told.detail
    assert len(engine.calls) == 1


def test_a_sandbox_out_of_service_is_infrastructure_and_not_the_engine() -> None:
    told = failure("finds_no_sandbox")
    assert (told.kind, told.source) == (FailureKind.INFRASTRUCTURE, Component.ENVIRONMENT)


def test_a_sample_that_failed_is_drawn_again_under_other_seeds() -> None:
    engine = DrawnBytes()
    failure("raises", generate=engine.generate)
    first, again = (request.sampling.seed for request, *_ in engine.calls)
    assert first != again


def test_a_masked_sample_keeps_its_place_and_trains_nothing(tmp_path: Path) -> None:
    receipt, _ = play("raises_once", task(samples=2), policy=MASK, folder=str(tmp_path))
    assert sorted(receipt.statuses) == [SampleStatus.MASKED, SampleStatus.VALID]
    at = receipt.statuses.index(SampleStatus.MASKED)
    assert (receipt.valid_tokens[at], receipt.finish_reasons[at]) == (0, "agent_raised")
    assert receipt.failures[at] is SampleFailure.MODEL


# --- failures that are not a sample's ---------------------------------------------------------------


class LostEngine:
    """Answers the first request, then is gone."""

    def __init__(self) -> None:
        self.engine = DrawnBytes()

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        if self.engine.calls:
            raise ActorLost("engine-0", "generate", "killed")
        return await self.engine.generate(request)


@pytest.mark.parametrize("name", ["converses", "catches_everything", "asks_until_it_is_answered"])
def test_a_lost_engine_fails_the_attempt_whatever_the_agent_makes_of_it(name: str) -> None:
    with pytest.raises(ActorLost):
        play(name, generate=LostEngine())


def test_an_agent_that_hangs_is_late_and_its_process_is_replaced() -> None:
    async def use(groups: AgentGroups) -> tuple[RolloutFailed, RolloutFailed]:
        one = task(deadline_s=1.0)
        late = list[RolloutFailed]()
        for _ in range(2):  # the second finds a process to run in
            with pytest.raises(RolloutFailed) as caught:
                await groups.run_group(client(one, DrawnBytes().generate), RETRY)
            late.append(caught.value)
        return late[0], late[1]

    for told in asyncio.run(with_agent("hangs", use)):
        assert (told.kind, told.source) == (FailureKind.INFRASTRUCTURE, Component.ENVIRONMENT)
        assert told.detail.startswith("the environment took longer")


def test_a_late_engine_is_told_from_a_late_agent() -> None:
    async def never(request: GenerateRequest) -> GenerateResult:
        return await asyncio.get_running_loop().create_future()

    async def use(groups: AgentGroups) -> Rolled:
        one = task(deadline_s=1.0)
        return await within_deadline(
            one, never, lambda generate: groups.run_group(client(one, generate), RETRY)
        )

    with pytest.raises(RolloutFailed) as caught:
        asyncio.run(with_agent("converses", use))
    assert (caught.value.reason, caught.value.source) == ("deadline", Component.ENGINE)


def test_an_episode_that_hangs_is_repeated_and_the_others_of_its_group_are_kept(
    tmp_path: Path,
) -> None:
    receipt, _ = play("hangs_once", task(samples=3), deadline_s=1.0, folder=str(tmp_path))
    assert receipt.rewards == (1.0,) * 3
    assert sorted(receipt.retries) == [0, 0, 1]
    assert sorted(receipt.failures) == [SampleFailure.MODEL, *[SampleFailure.NONE] * 2]


def test_an_episode_that_hangs_is_masked_with_its_own_reason(tmp_path: Path) -> None:
    options: dict[str, Any] = {"deadline_s": 1.0, "folder": str(tmp_path)}
    receipt, _ = play("hangs_once", task(samples=3), policy=MASK, **options)
    assert receipt.finish_reasons.count("episode_deadline") == receipt.masked_samples == 1
    told = failure("hangs", policy=MASK, deadline_s=0.5)
    assert told.kind is FailureKind.DATA
    assert "longer than environment.episode_deadline_s=0.5 (episode_deadline)" in told.detail


def test_an_episode_that_was_late_because_of_its_engine_is_no_failure_of_the_agent() -> None:
    async def never(request: GenerateRequest) -> GenerateResult:
        return await asyncio.get_running_loop().create_future()

    told = failure("converses", generate=never, policy=MASK, deadline_s=0.5)
    assert (told.kind, told.source) == (FailureKind.INFRASTRUCTURE, Component.ENVIRONMENT)
    assert "and waited for the model (episode_deadline)" in told.detail


# --- hostile agents ---------------------------------------------------------------------------------


def test_what_is_printed_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    receipt, _ = play("prints_forged_results")
    assert receipt.rewards == (1.0,)
    assert "100.0" in capfd.readouterr().err


def test_the_key_of_an_episode_ends_with_it(tmp_path: Path) -> None:
    engine = DrawnBytes()

    async def use(groups: AgentGroups) -> tuple[float, ...]:
        rewards = tuple[float, ...]()
        for _ in range(2):
            receipt, _ = await groups.run_group(client(task(), engine.generate), RETRY)
            rewards += receipt.rewards
        return rewards

    rewards = asyncio.run(with_agent("keeps_its_key", use, folder=str(tmp_path)))
    assert rewards == (2.0, 401.0)
    assert len(engine.calls) == 2


def test_a_task_that_an_agent_leaves_behind_ends_before_the_next_episode(tmp_path: Path) -> None:
    play("leaves_a_task_behind", folder=str(tmp_path))
    assert (tmp_path / "cancelled").exists()


def test_an_agent_inherits_no_variable_that_is_not_named() -> None:
    name = next(name for name in os.environ if name.startswith("PYTEST"))
    assert play("shows_its_environment", variable=name)[0].rewards == (0.0,)
    assert play("shows_its_environment", variable="PATH")[0].rewards == (1.0,)


def test_an_agent_that_is_not_async_is_refused_at_start() -> None:
    with pytest.raises(RewardFailed, match="is not async: write async def is_not_async"):
        play("is_not_async")
