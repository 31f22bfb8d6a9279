"""Keyword arguments are keys of a recipe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.config.by_value import is_by_value
from offbeat.config.keywords import format_overrides
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError

GIVEN = {"steps": 3, "model.path": "here", "environment.name": "arithmetic"}


def test_a_key_is_a_section_a_dotted_key_or_the_last_part_of_one() -> None:
    overrides = format_overrides(
        {
            **GIVEN,
            "trainer": {"optimizer": {"schedule": "linear"}},
            "learning_rate": 1e-5,
            "sampler.max_staleness": np.int64(2),
            "name": "no",
            "run_dir": Path("runs/mine"),
        }
    )
    config = load_recipe(None, overrides).config
    assert config.trainer.optimizer.learning_rate == 1e-5
    assert config.trainer.optimizer.schedule == "linear"
    assert (config.sampler.max_staleness, config.name, config.run_dir) == (2, "no", "runs/mine")
    assert config.model.path == str(Path("here").absolute())


def test_one_stop_string_is_a_list_of_one() -> None:
    for settings in ({"stop": "8"}, {"generator": {"sampling": {"stop": "8"}}}, {"stop": ["8"]}):
        config = load_recipe(None, format_overrides({**GIVEN, **settings})).config
        assert config.generator.sampling.stop == ("8",)


def test_a_name_that_fits_several_keys_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"generator\.device, trainer\.device") as refused:
        format_overrides({"device": "cpu"})
    assert "generator={'device': ...}" in str(refused.value)


def test_an_unknown_name_gets_the_suggestion_of_a_recipe() -> None:
    with pytest.raises(ConfigError, match="Did you mean `learning_rate`"):
        load_recipe(None, format_overrides({**GIVEN, "learnig_rate": 1}))


def test_what_can_be_called_is_given_by_value() -> None:
    def reward(row: object, response: str) -> float:
        return float(row == response)

    (override,) = format_overrides({"environment": {"name": "function", "target": reward}})
    config = load_recipe(None, [override, "steps=1", "model.path=here", "data.path=here"]).config
    assert config.environment.target is not None and is_by_value(config.environment.target)


def test_a_value_of_no_kind_that_a_recipe_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"argument steps: .* has the type object"):
        format_overrides({"steps": object()})


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5, "generator.sampling.top_k": 3},
        {"generator": {"sampling": {"top_k": 3}}, "top_k": 5},
    ],
)
def test_a_key_with_two_values_is_refused_by_both_arguments(settings: dict[str, Any]) -> None:
    first, second = settings
    said = rf"{second}: generator\.sampling\.top_k is \d here, but \d in {first}"
    with pytest.raises(ConfigError, match=said):
        format_overrides(settings)


def test_two_keys_of_one_section_may_be_given_apart() -> None:
    given = format_overrides({"generator": {"sampling": {"top_p": 0.5}}, "top_k": 3})
    assert given == ['generator={"sampling": {"top_p": 0.5}}', "generator.sampling.top_k=3"]
