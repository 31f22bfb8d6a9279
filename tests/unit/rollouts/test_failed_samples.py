"""What a failed sample costs: itself, after its retries, or its group."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.environments.protocol import (
    Environment,
    EnvironmentUnavailable,
    Episode,
    MultiTurn,
    Response,
    SingleTurn,
)
from offbeat.messages.failures import ActorLost, Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import (
    PROCESS_LOST,
    Prompt,
    Receipt,
    RolloutTask,
    SampleFailure,
    SampleStatus,
)
from offbeat.rollouts.calls import Generate
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import TOO_FEW, SampleFailurePolicy
from tests.support.environment_fakes import SAMPLING, result, task
from tests.support.virtual_time import run

RETRY = SampleFailurePolicy("retry", sample_retries=1)
MASK = SampleFailurePolicy("mask")
NONE, MODEL = SampleFailure.NONE, SampleFailure.MODEL
INFRASTRUCTURE = SampleFailure.INFRASTRUCTURE
VALID, MASKED = SampleStatus.VALID, SampleStatus.MASKED

Fault = Callable[[], Any]


class Flaky(MultiTurn):
    """Episodes of one turn and reward 1.0; ``faults[sample][try]`` is called in its step."""

    def __init__(self, faults: dict[int, list[Fault]]) -> None:
        self.faults = faults
        self.begun = list[int]()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (5, 6)

    def begin(self, task: RolloutTask, sample: int) -> Episode:
        faults = self.faults.get(sample, [])
        number = self.begun.count(sample)
        self.begun.append(sample)
        return FlakyEpisode(faults[number] if number < len(faults) else None)


class FlakyEpisode(Episode):
    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault

    async def step(self, response: Response) -> tuple[int, ...] | None:
        if self.fault is not None:
            answer = self.fault()
            if asyncio.iscoroutine(answer):
                await answer
        return None

    async def reward(self) -> float:
        return 1.0


class Picky(SingleTurn):
    """Reward 1.0, but raises for the whole call if a response holds ``x``."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (5, 6)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        assert task.samples == len(result.finish_reasons)
        if ord("x") in result.token_ids:
            raise ValueError("no number in the answer")
        return [1.0] * task.samples


def raises() -> None:
    raise ValueError("no tool of that name")


def unavailable() -> None:
    raise EnvironmentUnavailable("the sandbox answers 503")


def loses_its_process() -> None:
    detail, source = "another episode ended it", Component.ENVIRONMENT
    raise RolloutFailed(FailureKind.INFRASTRUCTURE, 7, 1, PROCESS_LOST, detail, source)


def hangs() -> Any:
    return asyncio.Event().wait()


class Engine:
    """Answers a request for the group with these texts, one for a single sample with the first."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.requests = texts or ("7",), list[GenerateRequest]()

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        return result(request.request_id, self.texts[: request.samples])


def rolled_out(
    environment: Environment,
    policy: SampleFailurePolicy,
    *,
    engine: Generate | None = None,
    samples: int = 3,
    least: int = 2,
) -> tuple[Receipt, Columns]:
    a_task = msgspec.structs.replace(task(samples=samples), min_valid_samples=least)
    generate = engine or Engine()

    async def main() -> tuple[Receipt, Columns]:
        return await run_group(
            a_task,
            environment,
            generate,
            SAMPLING,
            max_turns=2,
            max_model_len=64,
            policy=policy,
        )

    return run(main())


def failure(*args: Any, **options: Any) -> RolloutFailed:
    with pytest.raises(RolloutFailed) as caught:
        rolled_out(*args, **options)
    return caught.value


def test_a_failed_sample_alone_is_drawn_again_under_a_seed_of_its_own() -> None:
    environment, engine = Flaky({1: [raises]}), Engine()
    receipt, columns = rolled_out(environment, RETRY, engine=engine)
    assert sorted(environment.begun) == [0, 1, 1, 2]
    assert len({request.sampling.seed for request in engine.requests}) == 4
    assert receipt.valid == (True, True, True)
    assert receipt.failures == (NONE, MODEL, NONE)
    assert receipt.retries == (0, 1, 0)
    assert receipt.rewards == (1.0, 1.0, 1.0)
    assert columns["loss_mask"].all()


def test_a_sample_that_fails_again_is_masked_and_keeps_its_place() -> None:
    receipt, columns = rolled_out(Flaky({1: [raises, raises]}), RETRY)
    assert receipt.statuses == (VALID, MASKED, VALID)
    assert receipt.failures == (NONE, MODEL, NONE)
    assert receipt.retries == (0, 1, 0)
    assert receipt.finish_reasons == ("stop", "environment_raised", "stop")
    assert receipt.valid_rewards == (1.0, 1.0)
    assert receipt.valid_tokens == (2, 0, 2)
    assert columns["loss_mask"].tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("policy", [RETRY, MASK])
def test_losses_of_its_process_cost_a_sample_no_retry_up_to_a_bound(
    policy: SampleFailurePolicy,
) -> None:
    environment = Flaky({1: [loses_its_process] * 3})
    assert rolled_out(environment, policy)[0].retries == (0, 3, 0)
    environment = Flaky({1: [loses_its_process] * 99})
    assert rolled_out(environment, policy)[0].statuses == (VALID, MASKED, VALID)
    assert environment.begun.count(1) == policy.tries + 3


def test_with_mask_no_sample_is_drawn_again() -> None:
    environment = Flaky({0: [raises]})
    receipt, _ = rolled_out(environment, MASK)
    assert receipt.statuses == (MASKED, VALID, VALID)
    assert sorted(environment.begun) == [0, 1, 2]


def test_a_sample_without_a_token_gets_one_that_nothing_is_learned_from() -> None:
    class NeverBegins(Flaky):
        def begin(self, task: RolloutTask, sample: int) -> Episode:
            if sample == 0:
                raise ValueError("no sandbox for it")
            return super().begin(task, sample)

    receipt, columns = rolled_out(NeverBegins({}), MASK)
    assert receipt.response_tokens == (1, 2, 2)
    assert columns["response_ids"][0] == 6, "the last token of the prompt: the model has it"
    assert not columns["loss_mask"][0]
    assert columns["generation_logprobs"][0] == 0.0
    assert receipt.version_spans[0] == ((3, 1),), "as new as its group, which grows no older by it"
    assert receipt.turns == (0, 1, 1)


def test_an_environment_out_of_service_for_one_sample_is_no_failure_of_the_model() -> None:
    receipt, _ = rolled_out(Flaky({2: [unavailable, unavailable]}), RETRY)
    assert receipt.failures == (NONE, NONE, INFRASTRUCTURE)


def test_a_late_sample_is_masked_and_the_others_are_kept() -> None:
    environment = Flaky({2: [hangs]})
    receipt, _ = rolled_out(environment, RETRY)
    assert receipt.statuses == (VALID, VALID, MASKED)
    assert receipt.failures == (NONE, NONE, INFRASTRUCTURE)
    assert receipt.finish_reasons[2] == "deadline"
    assert receipt.late_samples == 1
    assert environment.begun.count(2) == 1, "no time is left for another try"


def test_a_group_with_too_few_valid_samples_has_failed_by_a_reason_of_its_own() -> None:
    told = failure(Flaky({0: [raises], 2: [raises]}), MASK)
    assert (told.kind, told.reason) == (FailureKind.DATA, TOO_FEW)
    assert "1 of 3 samples are valid" in told.detail
    assert told.detail.startswith(
        "test_failed_samples.py:91 in raises: ValueError: no tool of that"
    )
    assert "(environment_raised)" in told.detail and told.sample == 0
    receipt, _ = rolled_out(Flaky({0: [raises], 2: [raises]}), MASK, least=1)
    assert receipt.valid_rewards == (1.0,)


def test_too_few_for_want_of_infrastructure_may_be_tried_elsewhere() -> None:
    told = failure(Flaky({0: [raises], 2: [unavailable]}), MASK)
    assert (told.kind, told.reason) == (FailureKind.INFRASTRUCTURE, TOO_FEW)
    assert told.source is Component.ENVIRONMENT


def test_by_default_a_failed_sample_fails_its_group() -> None:
    told = failure(Flaky({1: [raises]}), SampleFailurePolicy())
    assert (told.kind, told.reason) == (FailureKind.DATA, "environment_raised")


@pytest.mark.parametrize("policy", [RETRY, MASK])
def test_a_lost_engine_is_no_sample_s_failure(policy: SampleFailurePolicy) -> None:
    async def lost(request: GenerateRequest) -> GenerateResult:
        raise ActorLost("engine-0", "generate", "killed")

    async def aborted(request: GenerateRequest) -> GenerateResult:
        return result(request.request_id, ["7"] * request.samples, finish="abort")

    with pytest.raises(ActorLost):
        rolled_out(Flaky({}), policy, engine=lost)
    assert failure(Flaky({}), policy, engine=aborted).reason == "generation_aborted"


def test_a_sample_that_waits_for_its_engine_too_long_is_held_against_the_engine() -> None:
    async def never(request: GenerateRequest) -> GenerateResult:
        await asyncio.Event().wait()
        raise AssertionError

    told = failure(Flaky({}), RETRY, engine=never)
    assert (told.reason, told.source) == ("deadline", Component.ENGINE)


def test_a_prompt_that_does_not_fit_is_not_tried_sample_by_sample() -> None:
    class Endless(Flaky):
        def encode(self, prompt: Prompt) -> tuple[int, ...]:
            return (5,) * 64

    environment = Endless({})
    assert failure(environment, RETRY).reason == "prompt_too_long"
    assert environment.begun == []


def test_a_reward_that_fails_at_one_response_costs_that_sample() -> None:
    receipt, columns = rolled_out(Picky(), MASK, engine=Engine("7", "x", "12"))
    assert receipt.statuses == (VALID, MASKED, VALID)
    assert receipt.finish_reasons == ("stop", "environment_raised", "stop")
    assert receipt.response_tokens == (2, 2, 3)
    assert columns["loss_mask"].tolist() == [True, True, False, False, True, True, True]
    assert np.all(columns["generation_logprobs"] == np.float32(-0.5))


def test_a_group_of_failed_samples_keeps_its_tokens_if_no_sample_has_to_be_valid() -> None:
    receipt, columns = rolled_out(Picky(), MASK, engine=Engine("x", "x", "x"), least=0)
    assert receipt.statuses == (MASKED,) * 3
    assert columns["response_ids"].tolist().count(ord("x")) == 3
    assert not columns["loss_mask"].any()
    assert failure(Picky(), MASK, engine=Engine("x", "x", "x"), least=1).reason == TOO_FEW


def test_a_group_without_a_token_fails_with_the_first_error() -> None:
    class NeverBegins(Flaky):
        def begin(self, task: RolloutTask, sample: int) -> Episode:
            raise ValueError("no sandbox")

    told = failure(NeverBegins({}), MASK, least=0)
    assert told.reason == TOO_FEW
    assert "no sandbox" in told.detail
    assert "none of 3 samples has a token" in told.detail


def test_a_response_at_which_the_reward_fails_is_drawn_again_by_itself() -> None:
    engine = Engine("7", "x", "12")
    receipt, columns = rolled_out(Picky(), RETRY, engine=engine)
    assert [request.samples for request in engine.requests] == [3, 1]
    assert len({request.sampling.seed for request in engine.requests}) == 2
    assert receipt.retries == (0, 1, 0)
    assert receipt.valid == (True, True, True)
    assert columns["response_ids"][2] == ord("7"), "another response than the one it failed at"


def test_a_value_that_is_no_reward_costs_its_sample() -> None:
    class ForgetsOne(Picky):
        async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[Any]:
            return [
                None if ids == ord("x") else 0.5 for ids in result.token_ids[result.offsets[:-1]]
            ]

    receipt, _ = rolled_out(ForgetsOne(), MASK, engine=Engine("7", "x", "12"))
    assert receipt.valid_rewards == (0.5, 0.5)
    assert receipt.finish_reasons[1] == "reward_none"
