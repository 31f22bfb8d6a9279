"""Recipes whose groups are rows of a file: what they need, and what has no meaning for them."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig

RECIPE: dict[str, Any] = {
    "steps": 2,
    "samples_per_group": 1,
    "model": {"path": "tiny"},
    "data": {"path": "rows.jsonl"},
    "environment": {"name": "demonstrations"},
    "generator": {"backend": "none"},
    "sampler": {"name": "in_order", "max_staleness": 1},
    "algorithm": {"loss": {"name": "sft"}},
}


def messages(**changes: Any) -> list[str]:
    found = clashes(RunConfig.model_validate(RECIPE | changes))
    return [f"{clash.message}. {clash.hint}" for clash in found]


def test_the_recipe_of_a_warm_start_has_no_clash() -> None:
    assert not messages()


@pytest.mark.parametrize(
    ("changes", "seen", "fix"),
    [
        (
            {"generator": {"backend": "embedded"}},
            "has no work for generator.backend=embedded",
            "Set generator.backend to none",
        ),
        ({"data": {}}, "needs a file of rows", "Set data.path"),
        (
            {"algorithm": {"loss": {"name": "clipped_pg"}}},
            "algorithm.loss.name=clipped_pg learns nothing",
            "Set algorithm.loss.name to sft",
        ),
        ({"samples_per_group": 8}, "a row holds one sample", "Set samples_per_group to 1"),
        (
            {"sampler": {"name": "ready_first"}},
            "sampler.name=ready_first decides by the age of samples",
            "Set sampler.name to in_order",
        ),
        (
            {"environment": {"name": "demonstrations", "reward_workers": 4}},
            "environment.reward_workers is not used",
            "Leave environment.reward_workers out",
        ),
        (
            {"rollout": {"sample_retries": 2}},
            "rollout.sample_retries is not used",
            "Leave rollout.",
        ),
        ({"eval": {"interval": 5}}, "needs an engine", "Set eval.interval to 0"),
    ],
)
def test_what_has_no_meaning_for_rows_is_refused_by_name(
    changes: dict[str, Any], seen: str, fix: str
) -> None:
    (text,) = (each for each in messages(**changes) if seen in each)
    assert fix in text


def test_samples_need_a_generator() -> None:
    (text,) = messages(environment={"name": "arithmetic"}, data={})
    assert "generator.backend=none draws no samples" in text


def test_a_generator_that_there_is_not_has_no_engines() -> None:
    with pytest.raises(ValueError, match="engines"):
        RunConfig.model_validate(RECIPE | {"generator": {"backend": "none", "engines": 4}})
