"""What ``offbeat check`` says of bounds of a preset, own samples imitated, equal samples, and small budgets."""

from typing import Any

import pytest

from offbeat.config.presets import PRESETS
from offbeat.config.run import RunConfig
from offbeat.launch.checks.algorithm import check_algorithm, check_microbatches
from offbeat.messages.finding import Level


def recipe(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"steps": 10, "model": {"path": "x"}, **values})


def said(**values: Any) -> list[str]:
    found = list(check_algorithm(recipe(**values)))
    assert all(each.level is Level.WARNING and each.fix for each in found)
    return [each.message for each in found]


def test_bounds_of_a_preset_beside_another_loss_are_named() -> None:
    (text,) = said(algorithm={"preset": "gspo", "loss": {"name": "cispo"}})
    assert "sets algorithm.loss.clip_low=0.0003 and algorithm.loss.clip_high=0.0004 for" in text
    assert "for its loss gspo, but they also apply to algorithm.loss.name=cispo" in text
    own = {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0}
    assert not said(algorithm={"preset": "gspo", "loss": own})
    assert not said(algorithm={"preset": "grpo", "loss": {"name": "gspo"}}), "the default of gspo"


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_said_of_a_preset_as_it_is(preset: str) -> None:
    assert not said(algorithm={"preset": preset})


def test_imitation_of_own_samples_is_warned_of_and_of_demonstrations_is_not() -> None:
    (text,) = said(algorithm={"loss": {"name": "sft"}})
    assert (
        "generator.backend=embedded samples from the policy: the model would imitate itself" in text
    )
    assert not said(
        algorithm={"loss": {"name": "sft"}},
        generator={"backend": "none"},
        environment={"name": "demonstrations"},
    )


def test_samples_that_are_all_alike_are_warned_of() -> None:
    def greedy(samples: int, **sampling: float) -> list[str]:
        return said(generator={"sampling": sampling}, samples_per_group=samples)

    (text,) = greedy(4, top_k=1)
    assert "generator.sampling.top_k=1 draws the same answer samples_per_group=4 times" in text
    assert greedy(4, min_p=1.0)
    assert not greedy(4, top_k=2, min_p=0.1)
    assert not greedy(1, top_k=1)


@pytest.mark.parametrize(("tokens", "warned"), [(3, True), (511, True), (512, False)])
def test_a_budget_below_the_longest_row_is_warned_of(tokens: int, warned: bool) -> None:
    trainer = {"backend": "torch", "max_tokens_per_microbatch": tokens}
    found = list(check_microbatches(recipe(trainer=trainer, generator={"max_model_len": 512})))
    assert bool(found) is warned
    assert all("generator.max_model_len=512. A row is never cut" in each.message for each in found)
