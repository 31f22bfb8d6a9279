"""Several reward functions: their weighted sum, the value of each, and what a failure of one costs."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.factory import make_environment
from offbeat.environments.function_reward import WeightedRewards
from offbeat.environments.inputs import ENVIRONMENT
from offbeat.environments.protocol import SingleTurn
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, SampleStatus
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from tests.support.environment_fakes import SAMPLING, CharTokenizer, answers, task

HERE = Path(__file__).parent
STYLE = {"target": "user_rewards:length", "weight": 0.5, "options": {"scale": 2.0}}
EVENS = {"target": "user_rewards:whole", "weight": -1.0}


def section(**rewards: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"name": "function", "rewards": rewards})


def rolled_out(
    config: EnvironmentConfig,
    *texts: str,
    on_failed: Any = "fail_group",
    evaluation: bool = False,
) -> Receipt:
    async def main() -> Receipt:
        environment = make_environment(config, CharTokenizer(), HERE)
        assert isinstance(environment, WeightedRewards)
        await environment.start()
        try:
            receipt, _ = await run_group(
                msgspec.structs.replace(task(samples=len(texts)), evaluation=evaluation),
                environment,
                answers(*texts),
                SAMPLING,
                max_turns=1,
                max_model_len=64,
                policy=SampleFailurePolicy(on_failed, 0),
            )
        finally:
            await environment.close()
        return receipt

    return asyncio.run(main())


def test_the_reward_is_the_sum_by_weight_and_each_value_is_told_by_name() -> None:
    receipt = rolled_out(section(style=STYLE, evens=EVENS), "a", "abc")
    by_name = dict(receipt.rewards_by_name)
    assert by_name == {"style": (2.0, 6.0), "evens": (1.0, 3.0)}
    assert receipt.rewards == (0.5 * 2.0 - 1.0, 0.5 * 6.0 - 3.0)


LETTERS = {"target": "user_rewards:for_letters"}


def test_a_function_that_returns_none_does_not_apply_to_the_sample() -> None:
    receipt = rolled_out(section(style=STYLE, letters=LETTERS), "a", "12")
    assert dict(receipt.rewards_by_name) == {"style": (2.0, 4.0), "letters": (1.0, None)}
    assert receipt.rewards == (0.5 * 2.0 + 1.0, 0.5 * 4.0)
    with pytest.raises(RolloutFailed, match="letters all return None: no reward applies") as caught:
        rolled_out(section(letters=LETTERS), "a", "12")
    assert (caught.value.reason, caught.value.sample) == ("reward_none", 1)


ANSWERED = {"target": "user_rewards:answered"}


def test_one_of_the_functions_may_name_the_answers() -> None:
    receipt = rolled_out(section(style=STYLE, right=ANSWERED), "7", "", evaluation=True)
    assert receipt.answers == ("7", "")
    assert dict(receipt.rewards_by_name) == {"style": (2.0, 0.0), "right": (1.0, 0.0)}


def test_two_functions_that_name_the_answer_of_a_sample_fail_it_by_name() -> None:
    with pytest.raises(RolloutFailed, match="rewards a, b each name the answer") as failed:
        rolled_out(section(a=ANSWERED, b=ANSWERED), "7")
    assert (failed.value.kind, failed.value.reason) == (FailureKind.DATA, "answer_named_twice")


def test_one_function_that_fails_fails_the_group_and_is_named() -> None:
    broken = {"target": "user_rewards:text"}
    with pytest.raises(RolloutFailed, match=r"reward is str.* \(reward broken\)") as failed:
        rolled_out(section(style=STYLE, broken=broken), "a", "abc")
    assert (failed.value.kind, failed.value.reason) == (FailureKind.DATA, "reward_wrong_type")


def test_a_sample_at_which_one_function_fails_is_masked_alone_and_counts_under_no_name() -> None:
    fragile = {"target": "user_rewards:raises"}
    receipt = rolled_out(section(style=STYLE, fragile=fragile), "bad", "abc", on_failed="mask")
    assert receipt.statuses == (SampleStatus.MASKED, SampleStatus.VALID)
    assert receipt.valid_rewards == (4.0,)
    assert {name: receipt.of_valid(each) for name, each in receipt.rewards_by_name} == {
        "style": (6.0,),
        "fragile": (1.0,),
    }


class Named(SingleTurn):
    """Returns these rewards, whatever it is asked."""

    def __init__(self, *rewards: NamedRewards) -> None:
        self.rewards = rewards

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (1,)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[NamedRewards]:
        return self.rewards


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (NamedRewards(1.0, {"other": 1.0}), "reward_names_differ"),
        (NamedRewards(1.0, {"style": float("nan")}), "reward_not_finite"),
        (NamedRewards(float("inf"), {"style": 1.0}), "reward_not_finite"),
    ],
)
def test_values_by_name_are_of_every_sample_and_finite(second: NamedRewards, reason: str) -> None:
    environment = Named(NamedRewards(0.0, {"style": 1.0}), second)
    engine = answers("a", "b")
    policy = SampleFailurePolicy("fail_group", 0)
    running = run_group(
        task(), environment, engine, SAMPLING, max_turns=1, max_model_len=64, policy=policy
    )
    with pytest.raises(RolloutFailed) as failed:
        asyncio.run(running)
    assert failed.value.reason == reason


def config(**environment: Any) -> list[str]:
    data = {"path": "/rows.jsonl"} if environment.get("name") == "function" else {}
    recipe = {"steps": 1, "model": {"path": "m"}, "data": data, "environment": environment}
    return [clash.message for clash in clashes(RunConfig.model_validate(recipe))]


def test_functions_are_named_in_one_place() -> None:
    rewards = {"style": STYLE}
    assert config(name="function", rewards=rewards) == []
    (message,) = config(name="function", rewards=rewards, target="a:b")
    assert message.startswith("environment.target is not used: environment.rewards names")
    (message,) = config(rewards=rewards)
    assert message.startswith("environment.rewards is not used: environment.name=arithmetic")
    (message,) = config(name="function", rewards={"style": {"target": "mine"}})
    assert message.startswith("environment.rewards.style.target=mine does not name a function")


def test_rewards_of_which_none_counts_are_refused() -> None:
    unweighted = {name: each | {"weight": 0} for name, each in {"a": STYLE, "b": EVENS}.items()}
    (message,) = config(name="function", rewards=unweighted)
    assert message.startswith("every weight of environment.rewards is 0")
    assert config(name="function", rewards=unweighted | {"b": EVENS}) == []


def test_the_source_of_each_function_is_an_input_of_its_own() -> None:
    assert section(style=STYLE, evens=EVENS).targets == {
        "environment.rewards.style.target": "user_rewards:length",
        "environment.rewards.evens.target": "user_rewards:whole",
    }
    assert EnvironmentConfig(name="function", target="a:b").targets == {ENVIRONMENT: "a:b"}
