"""Combinations that cannot work: each says why, and what to set."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.base import of_kind
from offbeat.config.by_value import give
from offbeat.config.crosschecks import clashes
from offbeat.config.limits import min_valid_samples, on_failed_sample
from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.plugins.megatron.section import MegatronTrainerConfig

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"

Report = Callable[..., str]


def messages(*overrides: dict[str, Any], dry_run: bool = False) -> list[str]:
    values: dict[str, Any] = {"steps": 2, "model": {"path": "tiny"}}
    for override in overrides:
        values |= override
    found = clashes(RunConfig.model_validate(values), dry_run=dry_run)
    return [f"{clash.message}. {clash.hint}" for clash in found]


def only(*overrides: dict[str, Any]) -> str:
    found = messages(*overrides)
    assert len(found) == 1, found
    return found[0]


def test_the_defaults_go_together() -> None:
    assert messages() == []


def test_more_valid_samples_than_a_group_has() -> None:
    masks = {"rollout": {"on_failed_sample": "mask", "min_valid_samples": 9}}
    text = only({"samples_per_group": 8}, masks)
    assert "rollout.min_valid_samples=9 can never be reached with samples_per_group=8" in text


def test_valid_samples_are_required_where_none_is_ever_masked() -> None:
    text = only({"samples_per_group": 8, "rollout": {"min_valid_samples": 4}})
    assert "not used with rollout.on_failed_sample=fail_group" in text


def test_a_penalty_for_length_needs_a_stretch_that_one_response_can_reach() -> None:
    sampling = {"generator": {"sampling": {"max_new_tokens": 64}}}
    assert messages({"rollout": {"overlong_tokens": 64}}, sampling) == []
    text = only({"rollout": {"overlong_tokens": 65}}, sampling)
    assert "rollout.overlong_tokens=65 is longer than a response can be" in text
    text = only({"rollout": {"overlong_penalty": 0.5}})
    assert "overlong_penalty=0.5 is not used without rollout.overlong_tokens" in text
    turns = {"environment": {"max_turns": 2}}
    assert "have several, or none" in only({"rollout": {"overlong_tokens": 8}}, sampling, turns)


SCHEDULES = [
    ({"schedule": "cosine", "learning_rate": 1e-6, "min_learning_rate": 2e-6}, "is above the peak"),
    ({"min_learning_rate": 1e-7}, "schedule=constant never falls"),
    ({"schedule": "wsd"}, "schedule=wsd needs trainer.optimizer.decay_steps"),
    ({"schedule": "linear", "decay_steps": 2}, "is not used: trainer.optimizer.schedule=linear"),
    ({"schedule": "wsd", "decay_steps": 2, "warmup_steps": 1}, "are more than steps=2"),
    ({"schedule": "wsd", "decay_steps": 1, "decay_samples": 8}, "two lengths of one phase"),
    ({"warmup_steps": 1, "warmup_samples": 8}, "two lengths of one phase"),
    ({"decay_samples": 9}, "trainer.optimizer.decay_samples=9 ("),
    (
        {"schedule": "wsd", "decay_samples": 9999, "warmup_steps": 1},
        "Set trainer.optimizer.decay_samples to ",
    ),
    (
        {"schedule": "wsd", "decay_steps": 1, "warmup_samples": 9999},
        "Set trainer.optimizer.warmup_samples to less than ",
    ),
]


@pytest.mark.parametrize(("optimizer", "told"), SCHEDULES)
def test_a_schedule_that_cannot_be_followed_is_refused(
    optimizer: dict[str, Any], told: str
) -> None:
    assert told in only({"trainer": {"optimizer": optimizer}})
    assert messages({"trainer": {"optimizer": {"schedule": "wsd", "decay_steps": 2}}}) == []


@pytest.mark.parametrize(("samples", "least"), [(1, 1), (2, 2), (8, 2)])
def test_a_group_needs_two_valid_samples_unless_it_has_one(samples: int, least: int) -> None:
    config = RunConfig.model_validate(
        {"steps": 2, "model": {"path": "tiny"}, "samples_per_group": samples}
    )
    assert min_valid_samples(config) == least


def test_a_sync_interval_beyond_the_staleness_bound() -> None:
    text = only({"sync": {"interval": 4}, "sampler": {"name": "in_order", "max_staleness": 2}})
    assert "sampler.max_staleness=2 is impossible with sync.interval=4" in text
    assert "3 weight versions behind" in text
    assert "Set sampler.max_staleness to 3 or more, or sync.interval to 3 or less." in text


def test_the_longest_sync_interval_that_staleness_covers_is_fine() -> None:
    assert not messages(
        {"sync": {"interval": 3}, "sampler": {"name": "in_order", "max_staleness": 2}}
    )


def test_a_lookahead_beyond_staleness() -> None:
    text = only({"sampler": {"name": "in_order", "max_staleness": 1, "max_lookahead": 2}})
    assert "sampler.max_lookahead=2 can never be reached" in text
    assert "Set sampler.max_lookahead to 1 or less" in text


@pytest.mark.parametrize(
    ("sampler", "reach"),
    [
        ({"name": "ready_first", "max_staleness": 1}, 64),
        ({"name": "in_order", "max_staleness": 1}, 64),
        ({"name": "in_order", "max_staleness": 3, "max_lookahead": 0}, 32),
        ({"name": "weight_fifo", "max_staleness": 2}, 96),
        ({"name": "windowed", "max_staleness": 0, "over_sampling_ratio": 1.5}, 48),
    ],
)
def test_more_in_flight_than_the_sampler_admits(sampler: dict[str, Any], reach: int) -> None:
    flow = {"groups_per_step": 32, "sampler": sampler}
    assert not messages(flow, {"rollout": {"max_in_flight": reach}})
    text = only(flow, {"rollout": {"max_in_flight": reach + 1}})
    assert f"rollout.max_in_flight={reach + 1} can never be reached" in text
    assert f"admits {reach} groups. Set rollout.max_in_flight to {reach} or less" in text


def test_only_a_custom_sampler_knows_what_it_admits() -> None:
    sampler = {"name": "custom", "target": "mine:Policy", "max_staleness": 0}
    assert not messages({"sampler": sampler, "rollout": {"max_in_flight": 999}})


@pytest.mark.parametrize("target", ["mine", "mine:", ":Policy", "mine:Policy:x", "a..b:C", "a b:C"])
def test_a_custom_sampler_names_a_class_in_a_module(target: str) -> None:
    text = only({"sampler": {"name": "custom", "target": target}})
    assert f"sampler.target={target} does not name a class in a module" in text
    assert "Write module:Class" in text


@pytest.mark.parametrize("target", ["mine:Policy", "my.own.samplers:Policy_2"])
def test_a_custom_samplers_module_may_be_in_a_package(target: str) -> None:
    assert not messages({"sampler": {"name": "custom", "target": target}})


def test_a_custom_sampler_may_be_given_by_value() -> None:
    class Policy: ...

    assert not messages({"sampler": {"name": "custom", "target": give(Policy)}})


def test_over_sampling_that_the_buffer_has_no_room_for() -> None:
    windowed = {"sampler": {"name": "windowed", "max_staleness": 1, "over_sampling_ratio": 1.5}}
    assert not messages(windowed, {"buffer": {"capacity_groups": 48}})
    text = only(windowed, {"buffer": {"capacity_groups": 47}})
    assert (
        "sampler.over_sampling_ratio=1.5 cannot be reached with buffer.capacity_groups=47" in text
    )
    assert "Set buffer.capacity_groups to 48 or more, leave it out, or set" in text


def test_without_over_sampling_a_buffer_may_be_smaller_than_the_window() -> None:
    plain = {"sampler": {"name": "windowed", "max_staleness": 3}}
    assert not messages(plain, {"buffer": {"capacity_groups": 16}})


def test_a_buffer_of_fewer_groups_than_a_step() -> None:
    assert not messages({"buffer": {"capacity_groups": 16}})
    text = only({"buffer": {"capacity_groups": 15}})
    assert "buffer.capacity_groups=15 is less than groups_per_step=16" in text
    assert "Set buffer.capacity_groups to 16 or more" in text


def test_a_buffer_of_fewer_bytes_than_a_step_says_how_many_it_takes() -> None:
    large = {
        "samples_per_group": 16,
        "generator": {"max_model_len": 32768, "sampling": {"max_new_tokens": 30000}},
    }
    text = only(large, {"buffer": {"capacity_mib": 50}})
    assert "16 groups of up to 6.08 MiB need 97.22 MiB" in text
    assert "Set buffer.capacity_mib to 98 or more" in text
    assert not messages(large, {"buffer": {"capacity_mib": 98}})


def test_a_first_wait_longer_than_the_longest() -> None:
    assert "rollout.backoff_s=20 is longer than rollout.backoff_max_s=10" in only(
        {"rollout": {"backoff_s": 20}}
    )


@pytest.mark.parametrize("new", [512, 600])
def test_a_response_that_leaves_no_room_for_a_prompt(new: int) -> None:
    text = only({"generator": {"sampling": {"max_new_tokens": new}}})
    assert (
        f"max_new_tokens={new} leaves no room for a prompt in generator.max_model_len=512" in text
    )
    assert f"Set generator.max_model_len to more than {new}" in text


def test_deterministic_decoding_takes_one_engine_and_one_order() -> None:
    both = messages({"generator": {"deterministic": True, "engines": 2}})
    assert (
        "is impossible with generator.engines=2: timing decides which engine serves a group"
        in both[0]
    )
    assert "is impossible with sampler.name=ready_first" in both[1]
    assert not messages({"generator": {"deterministic": True}, "sampler": {"name": "in_order"}})


@pytest.mark.parametrize("name", ["ready_first", "weight_fifo", "windowed", "custom"])
def test_only_in_order_makes_the_same_batches_again(name: str) -> None:
    target = {"target": "mine:Policy"} if name == "custom" else {}
    text = only({"generator": {"deterministic": True}, "sampler": {"name": name, **target}})
    assert f"generator.deterministic=true is impossible with sampler.name={name}" in text
    assert "Set sampler.name to in_order" in text


@pytest.mark.parametrize("name", ["in_order", "ready_first", "weight_fifo", "windowed"])
def test_every_policy_goes_with_stale_rollouts_aborted_and_with_filters(name: str) -> None:
    assert not messages(
        {
            "sampler": {"name": name},
            "sync": {"mode": "abort_stale"},
            "filters": {"zero_variance": True, "max_truncated_fraction": 0.5},
        }
    )


def test_the_reward_of_a_lone_sample_has_no_variance() -> None:
    found = messages({"samples_per_group": 1, "filters": {"zero_variance": True}})
    text = next(each for each in found if each.startswith("filters.zero_variance=true"))
    assert "refuses every group with samples_per_group=1" in text
    assert "Set samples_per_group to 2 or more" in text


def test_a_lone_sample_has_nothing_to_be_compared_with() -> None:
    text = only({"samples_per_group": 1, "algorithm": {"advantage": "rloo"}})
    assert "samples_per_group=1 gives algorithm.advantage=rloo nothing to compare" in text


def test_truncated_importance_sampling_needs_the_policys_logprobs() -> None:
    text = only({"algorithm": {"loss": {"tis_cap": 2}}})
    assert "algorithm.loss.tis_cap=2 has nothing to correct" in text
    assert "Set algorithm.loss.old_logprobs to policy" in text
    assert not messages({"algorithm": {"loss": {"tis_cap": 2, "old_logprobs": "policy"}}})


@pytest.mark.parametrize("run_dir", ["s3://bucket/runs/{name}", "gs://b", "file:///tmp/x"])
def test_a_run_directory_is_no_uri(run_dir: str) -> None:
    assert f"run_dir={run_dir} is a URI" in only({"run_dir": run_dir})
    assert not messages({"run_dir": "/runs/s3:/{name}"})


@pytest.mark.parametrize("run_dir", ["$SCRATCH/runs/{name}", "runs/$USER", "${HOME}/runs"])
def test_a_run_dir_with_a_variable_of_a_shell_is_refused(run_dir: str) -> None:
    assert "which only a shell fills in" in only({"run_dir": run_dir})
    assert not messages({"run_dir": "runs/5$/{name}"})


@pytest.mark.parametrize("run_dir", ["runs/{seed}", "runs/{name", "{}"])
def test_only_the_name_is_filled_into_the_run_directory(run_dir: str) -> None:
    assert "Only {name} is filled in" in only({"run_dir": run_dir})
    assert not messages({"run_dir": "/disk/{name}/{name}"})


DATA = {"data": {"path": "rows.jsonl"}}


@pytest.mark.parametrize("name", ["function", "custom", "agent"])
def test_user_code_has_to_be_named(name: str) -> None:
    text = only({"environment": {"name": name}}, DATA)
    assert f"environment.name={name} needs environment.target" in text
    assert "Set environment.target to module:name" in text


@pytest.mark.parametrize("target", ["rewards", "rewards.exact", ":exact", "rewards:"])
def test_a_target_names_an_object_in_a_module(target: str) -> None:
    text = only({"environment": {"name": "function", "target": target}}, DATA)
    assert f"environment.target={target} does not name an object in a module" in text


def test_a_grader_of_the_package_is_a_reward_and_no_environment() -> None:
    function = {"environment": {"name": "function", "target": "math_verify"}}
    assert messages(function, DATA) == []
    text = only({"environment": {"name": "custom", "target": "math_verify"}})
    assert "built-in rewards of environment.name=function: math_verify." in text


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({"name": "arithmetic"}, "environment.name=arithmetic"),
        ({"name": "function", "target": "math_verify"}, "environment.target=math_verify"),
    ],
)
def test_limits_of_the_calls_of_an_async_reward_where_there_is_none(
    environment: dict[str, Any], chosen: str
) -> None:
    limits = {"reward_retries": 2, "reward_concurrency": 64}  # 64 is the default
    data = DATA if environment["name"] == "function" else {}
    text = only({"environment": environment | limits}, data)
    assert f"environment.reward_retries is not used: {chosen} calls no async reward" in text


def test_a_budget_of_calls_of_a_reward_function_where_there_is_none() -> None:
    text = only({"rollout": {"reward_call_budget": 10**6}})
    assert "rollout.reward_call_budget is not used: environment.name=arithmetic calls no" in text


def test_a_budget_of_calls_covers_at_least_one_step() -> None:
    judge = {"environment": {"name": "function", "target": "judge:reward", "reward_retries": 1}}
    sizes = {"groups_per_step": 4, "samples_per_group": 8}
    text = only(judge, DATA, sizes, {"rollout": {"reward_call_budget": 63}})
    assert "make up to 16 calls each" in text
    assert "Set it to 64 or more" in text
    assert not messages(judge, DATA, sizes, {"rollout": {"reward_call_budget": 64}})


def test_what_is_done_about_a_budget_of_calls_needs_one() -> None:
    text = only({"rollout": {"on_reward_budget_spent": "stop"}})
    assert "is not used without rollout.reward_call_budget" in text


def test_a_target_that_nobody_reads() -> None:
    assert "is not used: environment.name=arithmetic is built in" in only(
        {"environment": {"target": "a:b"}}
    )


def test_an_environment_that_makes_its_prompts_reads_no_file() -> None:
    text = only(DATA, {"environment": {"name": "arithmetic"}})
    assert "data.path is not used: environment.name=arithmetic makes its own" in text


def test_arithmetic_scores_no_file_either() -> None:
    text = only({"eval": {"interval": 5, "path": "held_out.jsonl"}})
    assert "eval.path is not used: environment.name=arithmetic makes its own prompts" in text
    assert "Leave eval.path out" in text
    text = only({"eval": {"interval": 5, "sets": {"math": {"path": "held_out.jsonl"}}}})
    assert "eval.sets.math.path is not used" in text
    assert not messages({"eval": {"interval": 5}})


@pytest.mark.parametrize("section", ["data", "eval"])
def test_columns_need_the_file_that_has_them(section: str) -> None:
    text = only({section: {"columns": {"prompt": "problem"}}})
    assert f"{section}.columns is not used without {section}.path" in text


def test_a_reward_function_is_scored_on_a_file_or_on_its_own_prompts() -> None:
    function = {"environment": {"name": "function", "target": "a:b"}, **DATA}
    assert not messages(function, {"eval": {"interval": 5, "path": "held_out.jsonl"}})
    assert not messages(function, {"eval": {"interval": 5}})


@pytest.mark.parametrize("path", ["hf://owner/name/a.parquet", "hf://datasets/owner/name", "hf://"])
def test_a_path_on_the_hub_names_files_of_a_dataset(path: str) -> None:
    function = {"environment": {"name": "function", "target": "a:b"}}
    text = only(function, {"data": {"path": path}})
    assert f"data.path={path} names no files on the hub" in text
    assert "Write hf://datasets/OWNER/NAME[@REVISION]/FILES" in text
    good = "hf://datasets/owner/name@refs%2Fconvert%2Fparquet/main/train/*.parquet"
    assert not messages(function, {"data": {"path": good}})


@pytest.mark.parametrize("file", ["train.csv", "data/*.arrow", "train.jsonl.gz"])
def test_a_path_on_the_hub_names_files_that_can_be_read(file: str) -> None:
    path = {"data": {"path": f"hf://datasets/owner/name/{file}"}}
    text = only({"environment": {"name": "function", "target": "a:b"}}, path)
    assert "names files that cannot be read: prompts are Parquet or JSON Lines" in text


def test_questions_come_from_a_file() -> None:
    text = only({"environment": {"name": "gsm8k"}})
    assert "Set data.path to a file with `question` and `answer` in each row" in text
    assert not messages({"environment": {"name": "gsm8k"}, **DATA})


AGENT = {"name": "agent", "target": "a:b"}


def test_an_agent_needs_tasks() -> None:
    assert "environment.name=agent has no tasks" in only({"environment": AGENT})
    assert not messages({"environment": AGENT}, DATA)


def test_an_agent_counts_its_turns_itself() -> None:
    text = only({"environment": {**AGENT, "max_turns": 4}}, DATA)
    assert "environment.max_turns=4 is not used" in text
    assert "an agent decides itself how often it calls the model" in text


def test_variables_are_kept_from_agents_alone() -> None:
    text = only({"environment": {"name": "arithmetic", "variables": ["SEARCH_KEY"]}})
    assert "environment.variables=['SEARCH_KEY'] is not used" in text


def test_the_renderer_of_every_agent_is_one_key() -> None:
    qwen3 = {"renderer": {"name": "qwen3"}}
    text = only({"environment": {"name": "arithmetic", **qwen3}})
    assert "environment.renderer={'name': 'qwen3'} is not used" in text


def test_an_agent_has_no_deadline_for_its_reward() -> None:
    agent = {"name": "agent", "target": "my.agents:run", "reward_deadline_s": 3}
    text = only({"environment": agent}, DATA)
    assert "environment.reward_deadline_s=3.0 is not used" in text
    assert "Set environment.episode_deadline_s instead" in text


def test_an_episode_has_less_time_than_its_group() -> None:
    limit: dict[str, Any] = {"name": "agent", "target": "my.agents:run", "episode_deadline_s": 20}
    environment, group = {"environment": limit}, {"rollout": {"deadline_s": 20.5}}
    assert not messages(environment, DATA, group)
    text = only(environment, DATA, {"rollout": {"deadline_s": 20}})
    assert "environment.episode_deadline_s=20 is never reached" in text
    assert "Set it to 10 or less" in text
    text = only({"environment": {"name": "arithmetic", "episode_deadline_s": 20}})
    assert "environment.episode_deadline_s=20.0 is not used" in text


def test_episodes_share_a_process_where_an_agent_is_a_function() -> None:
    text = only({"environment": {"name": "arithmetic", "episodes_per_child": 4}})
    assert "environment.episodes_per_child=4 is not used" in text
    program = {"name": "agent", "command": ["./agent"], "episodes_per_child": 4}
    assert "environment.episodes_per_child=4 is impossible" in only({"environment": program}, DATA)


def test_an_agent_is_a_function_or_a_program() -> None:
    program = {"name": "agent", "command": ["./agent", "--fast"]}
    assert not messages({"environment": program}, DATA)
    assert "nothing names your agent function" in only({"environment": {"name": "agent"}}, DATA)
    for other in ({"target": "a:b"}, {"options": {"x": 1}}):
        text = only({"environment": {**program, **other}}, DATA)
        assert f"environment.{next(iter(other))} is not used: the agent is the program" in text
    assert "only an agent may be a program" in only({"environment": {"command": ["./agent"]}})


@pytest.mark.parametrize(
    ("key", "value"), [("max_sample_tokens", 7), ("max_branches", 7), ("branches", "mask")]
)
def test_keys_about_the_samples_of_agents_are_for_agents_alone(key: str, value: Any) -> None:
    assert f"rollout.{key}={value} is not used" in only({"rollout": {key: value}})
    assert not messages({"environment": AGENT, "rollout": {key: value}}, DATA)


def test_samples_of_an_agent_are_drawn_again_unless_the_recipe_says_otherwise() -> None:
    def policy(**rollout: Any) -> str:
        values = {"steps": 2, "model": {"path": "tiny"}, "environment": AGENT, "rollout": rollout}
        return on_failed_sample(RunConfig.model_validate(values))

    assert policy() == "retry"
    assert policy(on_failed_sample="fail_group") == "fail_group"
    assert not messages({"environment": AGENT, "rollout": {"min_valid_samples": 2}}, DATA)


def test_a_reward_function_needs_prompts() -> None:
    text = only({"environment": {"name": "function", "target": "a:b"}})
    assert "environment.name=function has no prompts" in text


@pytest.mark.parametrize("section", ["generator", "trainer"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cuda"}, "Ray hides the GPUs from an actor that reserves none"),
        ({"device": "cuda:0"}, "Ray hides the GPUs"),
        ({"gpus": 1}, "the GPU would be reserved and left idle"),
        ({"device": "gpu"}, "is not a device that this version runs on"),
    ],
)
def test_devices_and_reserved_gpus_agree(
    section: str, values: dict[str, Any], message: str
) -> None:
    assert message in only({section: values})
    assert not messages({section: {"device": "cuda", "gpus": 0.5}})


def test_a_clash_is_reported_at_the_override_that_made_it(report: Report) -> None:
    text = report(QUICKSTART.read_text(), "sync.interval=9")
    assert "override 'sync.interval=9': sampler.max_staleness=1 is impossible" in text


def test_a_clash_of_the_recipes_own_is_reported_at_its_line(report: Report) -> None:
    text = report("steps: 1\nmodel: {path: x}\nsamples_per_group: 1\n")
    assert "recipe.yaml:3: samples_per_group=1 gives" in text


def test_only_tensor_parallel_ranks_can_share_tokens() -> None:
    alone: dict[str, Any] = {"backend": "megatron", "sequence_parallel": True}
    assert "tensor-parallel ranks that share the tokens" in only({"trainer": alone})
    assert not messages({"trainer": {**alone, "tensor_parallel": 2}})


def test_experts_are_divided_over_the_ranks_of_a_stage() -> None:
    sizes = {"tensor_parallel": 2, "context_parallel": 2, "data_parallel": 3}
    trainer: dict[str, Any] = {"backend": "megatron", **sizes}
    text = only({"trainer": {**trainer, "expert_parallel": 8}})
    assert "does not divide the 12 ranks of a pipeline stage" in text
    assert "Set their product to a divisor of 12" in text
    assert not messages({"trainer": {**trainer, "expert_parallel": 4, "expert_tensor_parallel": 3}})


def test_every_stage_of_a_pipeline_has_its_number_of_layers() -> None:
    trainer: dict[str, Any] = {"backend": "megatron", "layers_per_stage": [2, 3]}
    assert "or set trainer.pipeline_parallel to 2" in only({"trainer": trainer})
    assert not messages({"trainer": {**trainer, "pipeline_parallel": 2}})


def test_a_dry_run_takes_a_recipe_for_another_machine() -> None:
    overrides = ["trainer.backend=megatron", "trainer.tensor_parallel=8", "trainer.device=cuda"]
    trainer = load_recipe(QUICKSTART, overrides, dry_run=True).config.trainer
    assert of_kind(MegatronTrainerConfig, trainer).tensor_parallel == 8


def test_stubs_come_together_or_not_at_all() -> None:
    text = only({"trainer": {"backend": "stub"}})
    assert "trainer.backend=stub cannot work with generator.backend=embedded" in text
    assert "Set all three to stub, or none" in text
    assert not messages({"trainer": {"backend": "stub"}}, dry_run=True)


def test_sets_and_a_path_of_evaluations_exclude_each_other() -> None:
    function = {
        "environment": {"name": "function", "target": "m:f"},
        "data": {"path": "rows.jsonl"},
    }
    text = only(function, {"eval": {"interval": 5, "path": "a.jsonl", "sets": {"math": {}}}})
    assert "eval.path is not used: eval.sets names the sets that are scored" in text


def test_an_evaluation_at_the_start_needs_evaluations() -> None:
    assert "eval.at_start does nothing with eval.interval=0" in only({"eval": {"at_start": True}})


def test_adapters_leave_no_router_to_balance() -> None:
    text = only({"trainer": {"lora": {}, "moe": {"bias_update_rate": 0.001}}})
    assert "trainer.moe balances routers, which trainer.lora freezes" in text
    assert messages({"trainer": {"lora": {}, "moe": {"bias_update_rate": 0}}}) == []


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"step_std": True}, "algorithm.loss.step_std=true would divide the losses of trainer.moe"),
        (
            {"icepop_band": (0.5, 5), "old_logprobs": "current", "count_dropped": False},
            "algorithm.loss.count_dropped=false divides by the kept tokens",
        ),
    ],
)
def test_losses_of_routers_have_the_divisor_of_the_tokens_they_are_sums_over(
    loss: dict[str, Any], said: str
) -> None:
    with_losses = {"trainer": {"moe": {"z_loss_coef": 0.1}}}
    assert said in only({"algorithm": {"loss": loss}}, with_losses)
    by_biases = {"trainer": {"moe": {"bias_update_rate": 0.001}}}
    assert messages({"algorithm": {"loss": loss}}, by_biases) == []
    for normalize in ("tokens", "sequences", "constant"):
        assert messages({"algorithm": {"loss": {"normalize": normalize}}}, with_losses) == []
    drops_nothing = {"algorithm": {"loss": {"count_dropped": False}}}
    assert messages(drops_nothing, with_losses) == []


def test_beside_adapters_nothing_is_left_to_freeze() -> None:
    text = only({"trainer": {"lora": {}, "freeze": ["lm_head.*"]}})
    assert "trainer.freeze=['lm_head.*'] has no effect with trainer.lora" in text
    assert messages({"trainer": {"freeze": ["lm_head.*"]}}) == []


def test_one_rank_of_torch_in_bfloat16_rounds_at_random() -> None:
    optimizer, short = {"rounding": "stochastic"}, {"model": {"path": "tiny", "dtype": "bfloat16"}}
    assert messages(short, {"trainer": {"optimizer": optimizer}}) == []
    text = only({"trainer": {"optimizer": optimizer}})
    assert "rounding=stochastic does nothing with model.dtype=float32" in text
    text = only(short, {"trainer": {"optimizer": optimizer, "data_parallel": 2}})
    assert "rounding=stochastic cannot be combined with 2 trainer ranks" in text
    assert "trainer.data_parallel and trainer.tensor_parallel of 1" in text
    text = only(short, {"trainer": {"optimizer": optimizer, "backend": "megatron"}})
    assert "megatron rounds weights itself" in text
