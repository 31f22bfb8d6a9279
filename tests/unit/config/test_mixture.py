"""Several environments in a recipe: what each of them is, and what is refused beside them."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.limits import max_group_bytes, on_failed_sample
from offbeat.config.mixture import (
    environment_views,
    environment_weights,
    environment_workers,
    evaluation_sets,
    prompt_paths,
    sampling_identity,
)
from offbeat.config.run import RunConfig

AGENT: dict[str, Any] = {
    "environment": {"name": "agent", "target": "a:b", "workers": 2},
    "data": {"path": "/tasks.jsonl"},
}
SUMS: dict[str, Any] = {"weight": 2, "environment": {"options": {"high": 9}}}


def config(environments: dict[str, Any], **changes: Any) -> RunConfig:
    recipe = {"steps": 1, "model": {"path": "m"}, "environments": environments}
    return RunConfig.model_validate({**recipe, **changes})


def messages(environments: dict[str, Any], **changes: Any) -> list[str]:
    found = clashes(config(environments, **changes))
    return [f"{clash.keys[0]}: {clash.message}. {clash.hint}" for clash in found]


def test_a_single_environment_is_one_without_a_name() -> None:
    single = RunConfig.model_validate({"steps": 1, "model": {"path": "m"}})
    assert environment_views(single) == {"": single}
    assert environment_weights(single) == {}


@pytest.mark.plugins
def test_each_of_several_is_the_config_of_a_run_with_it_alone() -> None:
    views = environment_views(config({"sums": SUMS, "agent": AGENT}))
    assert views["sums"].environment.options == {"high": 9}
    assert views["agent"].data.path == "/tasks.jsonl"
    assert [view.environments for view in views.values()] == [{}, {}]
    assert {view.environment.workers for view in views.values()} == {2}, "a worker plays them all"
    assert environment_workers(config({"sums": SUMS, "agent": AGENT})) == 2


def test_weights_are_shares_whatever_they_are_multiples_of() -> None:
    mix = {"a": {"weight": 20}, "b": {"weight": 30}}
    assert environment_weights(config(mix)) == {"a": 2, "b": 3}


@pytest.mark.plugins
def test_limits_hold_for_the_largest_of_them_and_failures_cost_what_they_cost_alone() -> None:
    mix, sums = config({"sums": SUMS, "agent": AGENT}), config({"sums": SUMS})
    views = environment_views(mix)
    assert max_group_bytes(mix) == max_group_bytes(views["agent"]) > max_group_bytes(sums)
    assert on_failed_sample(views["agent"]) == "retry"
    assert on_failed_sample(views["sums"]) == "fail_group"


def test_a_group_is_trained_under_the_turns_of_its_environment_alone() -> None:
    turns = {"sums": {"environment": {"max_turns": 2}}}
    assert sampling_identity(config({"sums": SUMS})) != sampling_identity(config(turns))


@pytest.mark.plugins
def test_each_has_an_evaluation_set_of_its_own() -> None:
    held_out = {**AGENT, "eval": {"path": "/held_out.jsonl", "samples": 4}}
    mix = config({"sums": SUMS, "agent": held_out}, eval={"interval": 5, "prompts": 9})
    sets = {
        name: (each.path, each.prompts, each.samples) for name, each in evaluation_sets(mix).items()
    }
    assert sets == {"sums": (None, 9, 1), "agent": ("/held_out.jsonl", 9, 4)}
    assert prompt_paths(mix) == {
        "environments.agent.data.path": "/tasks.jsonl",
        "environments.agent.eval.path": "/held_out.jsonl",
    }


@pytest.mark.parametrize(
    ("environments", "changes", "told"),
    [
        (
            {"sums": SUMS},
            {"environment": {"name": "gsm8k"}},
            "environment: environment is not used",
        ),
        (
            {"sums": SUMS},
            {"data": {"epochs": 2}},
            "data: data is not used: the run trains on the environments",
        ),
        (
            {"sums": SUMS},
            {"eval": {"interval": 1, "sets": {"x": {}}}},
            "eval.sets: eval.sets is not used: each of environments has a separate evaluation set",
        ),
        (
            {"rows": {"environment": {"name": "demonstrations"}, "data": {"path": "/r"}}},
            {},
            "environments.rows.environment.name=demonstrations cannot be mixed",
        ),
        (
            {"sums": SUMS, "own": {"environment": {"name": "function"}, "data": {"path": "/r"}}},
            {},
            "environments.own.environment.name=function needs environments.own.environment.target",
        ),
        (
            {"sums": {**SUMS, "data": {"path": "/r"}}},
            {},
            "environments.sums.data.path is not used: environments.sums.environment.name=arithmetic",
        ),
        ({"sums": SUMS}, {"rollout": {"max_branches": 2}}, "rollout.max_branches=2 is not used"),
    ],
)
def test_what_cannot_work_is_named_by_its_place(
    environments: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    (message,) = messages(environments, **changes)
    assert told in message


@pytest.mark.plugins
def test_limits_of_agents_are_read_where_one_environment_is_an_agent() -> None:
    assert messages({"sums": SUMS, "agent": AGENT}, rollout={"max_branches": 2}) == []
