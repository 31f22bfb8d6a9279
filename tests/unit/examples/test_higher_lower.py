"""The example of an environment of several turns, played against engines that answer from a script."""

import asyncio
from pathlib import Path

import pytest

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.factory import make_environment
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Receipt
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from tests.support.environment_fakes import SAMPLING, CharTokenizer, result, task

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "environments"


def played(*guesses: str, answer: int = 7) -> tuple[Receipt, list[str]]:
    """The receipt of a group of one sample, and what the model was shown at each turn."""
    seen, left = list[str](), list(guesses)

    async def generate(request: GenerateRequest) -> GenerateResult:
        seen.append(CharTokenizer().decode(list(request.prompt_ids)))
        return result(request.request_id, [left.pop(0)])

    section = EnvironmentConfig(name="custom", target="higher_lower:HigherLower")
    environment = make_environment(section, CharTokenizer(), EXAMPLES)
    row = {"prompt": "0 to 9: ", "answer": answer}
    rolled_out = run_group(
        task(row, samples=1),
        environment,
        generate,
        SAMPLING,
        max_turns=3,
        max_model_len=200,
        policy=SampleFailurePolicy(),
    )
    receipt, _ = asyncio.run(rolled_out)
    return receipt, seen


@pytest.mark.parametrize(
    ("guesses", "reward"),
    [(["7"], 1.0), (["5", "7"], 0.5), (["9", "5", "6"], 0.0), (["seven"], 0.0)],
)
def test_fewer_guesses_are_worth_more(guesses: list[str], reward: float) -> None:
    receipt, seen = played(*guesses)
    assert receipt.rewards == (reward,)
    assert len(seen) == len(guesses)


def test_each_turn_shows_the_whole_history_with_its_hint() -> None:
    _, seen = played("5", "9", "7")
    assert seen == ["0 to 9: ", "0 to 9: 5</s>\nhigher: ", "0 to 9: 5</s>\nhigher: 9</s>\nlower: "]
