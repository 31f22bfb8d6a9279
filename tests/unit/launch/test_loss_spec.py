"""What the loss of a step takes from other sections of the recipe."""

from typing import Any

import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.presets import PRESETS
from offbeat.config.run import RunConfig


def spec(**loss: Any) -> LossSpec:
    sampling = {"max_new_tokens": 300, "temperature": 0.7}
    return LossSpec.of(
        RunConfig.model_validate(
            {
                "steps": 1,
                "model": {"path": "m"},
                "generator": {"sampling": sampling},
                "algorithm": {"loss": loss},
            }
        )
    )


def test_logprobs_are_at_the_temperature_that_samples_are_drawn_at() -> None:
    assert spec() == LossSpec(temperature=0.7)


@pytest.mark.parametrize(("said", "want"), [({}, 300), ({"constant_tokens": 40}, 40)])
def test_a_constant_is_the_budget_of_a_call_unless_it_is_said(
    said: dict[str, int], want: int
) -> None:
    assert spec(normalize="constant", **said).config.constant_tokens == want


def test_what_divides_by_no_constant_has_none() -> None:
    assert spec(normalize="tokens").config.constant_tokens is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_all_that_its_loss_needs(name: str) -> None:
    values = {"steps": 1, "model": {"path": "m"}, "algorithm": {"preset": name}}
    made = LossSpec.of(RunConfig.model_validate(values)).config
    assert (made.constant_tokens is None) == (made.normalize != "constant")
