"""What a user reads when a recipe is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.config.peer_tables import PEER_KEYS
from offbeat.config.problems import ConfigError
from offbeat.config.yaml_text import MAX_NODES, MAX_TEXT_BYTES

SMALL = "steps: 2\nmodel: {path: tiny}\n"

Write = Callable[..., Path]
Report = Callable[..., str]


def test_all_problems_come_in_one_report(report: Report) -> None:
    text = report(
        "stepz: 2\nmodel: {path: x, dtype: int8}\nseed: yes\nsync: {interval: 9}\nfoo: 1",
        "bar",
        "trainer.threads=0",
    )
    assert text.startswith("8 problems in the configuration\n")
    for part in (
        "steps: required and missing",
        "recipe.yaml:1: stepz = 2: unknown key",
        "recipe.yaml:2: model.dtype = 'int8': has to be: one of float32, bfloat16, float64",
        "recipe.yaml:3: seed = true: has to be: integer",
        "recipe.yaml:4: sampler.max_staleness=1 is impossible with sync.interval=9",
        "recipe.yaml:5: foo = 1: unknown key",
        "override 'bar': this is not an override",
        "override 'trainer.threads=0': trainer.threads = 0: has to be: integer, at least 1",
    ):
        assert part in text


def test_problems_are_listed_in_reading_order(report: Report) -> None:
    lines = report("seed: x\nsteps: x\nname: ''", "a=1").splitlines()
    places = [line.split(": ")[0].strip() for line in lines if ": has to be" in line]
    assert places == ["recipe.yaml:1", "recipe.yaml:2", "recipe.yaml:3"]
    assert "override" in lines[-2]


# --- keys ----------------------------------------------------------------------------------------


def test_a_misspelt_key_is_given_its_nearest_name_with_type_and_default(report: Report) -> None:
    text = report(f"{SMALL}sampler:\n  name: in_order\n  max_stalenes: 2\n")
    assert "recipe.yaml:5: sampler.max_stalenes = 2: unknown key" in text
    assert "Did you mean `max_staleness`? (integer, at least 0; default" in text


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("buffer.capacity_mb", "capacity_mib"),
        ("sync.chunk_mb", "chunk_mib"),
        ("sync.slowest_mb_s", "slowest_mib_s"),
        ("environment.reward_memory_mb", "reward_memory_mib"),
    ],
)
def test_a_size_under_its_old_unit_is_given_the_new_name(
    report: Report, old: str, new: str
) -> None:
    text = report(SMALL, f"{old}=64")
    assert f"{old} = 64: unknown key" in text
    assert f"Did you mean `{new}`?" in text


def test_a_key_in_the_wrong_section_is_told_its_own(report: Report) -> None:
    assert "`max_staleness` belongs in `sampler`" in report(f"{SMALL}max_staleness: 2")


def test_a_misspelt_key_in_the_wrong_section_is_told_both(report: Report) -> None:
    text = report(f"{SMALL}trainer: {{learning_rat: 1e-3}}")
    assert "Did you mean `learning_rate`? `learning_rate` belongs in `trainer.optimizer`" in text


@pytest.mark.plugins
def test_a_key_of_several_sections_names_them_all(report: Report) -> None:
    assert "`threads` belongs in `generator` or `trainer` or `trainer.encoder`." in report(
        f"{SMALL}threads: 2"
    )


def test_a_key_like_no_other_gets_the_list(report: Report) -> None:
    text = report(f"{SMALL}sync: {{zzz: 1}}")
    assert "`sync` has: adapter, canary_interval, canary_tolerance, chunk_mib, deadline_s" in text


def test_a_key_of_another_choice_names_that_choice(report: Report) -> None:
    text = report(f"{SMALL}sampler: {{name: ready_first, max_lookahead: 1}}")
    assert "sampler.name=ready_first has no `max_lookahead`" in text
    assert "Only sampler.name=in_order has it" in text


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "trainer.pipeline_parallel=2",
            "trainer.backend=torch has no `pipeline_parallel` Only trainer.backend=megatron has it: remove it, or set trainer.backend to megatron.",
        ),
        ("trainer.sequence_parallel=true", "Only trainer.backend=megatron has it"),
        (
            "sync.slack_s=1",
            "sync.transport=object_store has no `slack_s` Only sync.transport=reshard has it: remove it, or set sync.transport to reshard.",
        ),
        ("generator.vllm.kv=keep", "generator.backend=embedded has no `vllm`"),
        (
            "generator={backend: vllm, deterministic: true}",
            "Only generator.backend=embedded or stub",
        ),
        ("trainer={backend: stub, threads: 2}", "Only trainer.backend=torch or megatron has it"),
        (
            "algorithm.loss={name: sft, tis_cap: 2}",
            "Only algorithm.loss.name=clipped_pg or gspo or cispo or sapo or custom has it",
        ),
        (
            "algorithm={preset: cispo, loss: {dual_clip: 3}}",
            "algorithm.loss.name=cispo has no `dual_clip`",
        ),
        (
            "algorithm={preset: tis, loss: {name: sft}}",
            "algorithm.loss.name=sft has no `clip_high`, which algorithm.preset=tis sets",
        ),
    ],
)
def test_a_key_of_another_backend_names_the_one_chosen_and_the_fix(
    report: Report, override: str, said: str
) -> None:
    text = report(SMALL, override, dry_run=True)
    assert said in " ".join(text.split())
    assert text.startswith("1 problem in")


@pytest.mark.plugins
def test_a_bad_value_below_a_choice_is_reported_at_its_key(report: Report) -> None:
    text = report(SMALL, "generator={backend: vllm, vllm: {kv: all}, threads: 0}")
    assert "generator.vllm.kv = 'all': has to be: one of recompute, keep" in text
    assert "generator.threads = 0: has to be: integer, at least 1" in text


def test_a_key_given_twice_names_both_lines(report: Report) -> None:
    text = report(f"{SMALL}seed: 1\nseed: 2\n")
    assert "recipe.yaml:4: seed = 2: given twice; first at recipe.yaml:3" in text


def test_a_missing_key_says_what_it_is(report: Report) -> None:
    text = report("seed: 1")
    assert "steps: required and missing: integer, at least 1" in text
    assert "Training steps. " in text
    assert "Add it, or pass steps=..." in text
    assert "model: required and missing: section" in text


def test_a_bad_value_is_not_reported_as_missing_too(report: Report) -> None:
    assert "missing" not in report("steps: true\nmodel: {path: x}")


# --- values --------------------------------------------------------------------------------------


def test_a_value_out_of_range_shows_value_range_default_and_meaning(report: Report) -> None:
    text = report(f"{SMALL}generator: {{engines: 0}}")
    assert "recipe.yaml:3: generator.engines = 0: has to be: integer, at least 1" in text
    assert "Default: 1. Number of engines." in text


@pytest.mark.plugins
@pytest.mark.parametrize("more", ["", "\n  slack_s: 20"])
def test_a_recipe_with_the_removed_gloo_broadcast_names_what_to_set_instead(
    report: Report, more: str
) -> None:
    said = report(f"steps: 1\nmodel: {{path: .}}\nsync:\n  transport: gloo{more}\n")
    assert said.startswith("1 problem in the configuration\n  recipe.yaml:4:")
    assert "sync.transport = 'gloo': has to be: one of object_store, reshard" in said
    assert (
        "The gloo broadcast was removed. Set sync.transport to reshard, which also sends over TCP, "
        "or to object_store." in said
    )


def test_a_value_close_to_a_choice_is_told_so(report: Report) -> None:
    assert "Did you mean `embedded`?" in report(f"{SMALL}generator: {{backend: embeded}}")
    nullable = report(f"{SMALL}rollout: {{on_failed_sample: maskk}}")
    assert "Did you mean `mask`?" in nullable, "the last of the names, which null follows"


@pytest.mark.parametrize(
    "override",
    [
        "steps=true",
        "steps=2.5",
        "steps=null",
        "steps=[1]",
        "steps={a: 1}",
        "trainer.optimizer.betas=[0.9, true]",
        "trainer.optimizer.betas=[0.9, 1.0]",
        "trainer.optimizer.learning_rate=.nan",
        "generator.gpus=.inf",
        "generator.sampling.top_p=0",
        "generator.sampling.top_p=1.5",
        "generator.sampling.top_k=-1",
        "generator.sampling.top_k=1.5",
        "generator.sampling.min_p=-0.1",
        "generator.sampling.min_p=1.5",
        "generator.sampling.stop=",
        "generator.sampling.stop={a: b}",
        "generator.sampling.stop=[8]",
        "generator.sampling.stop=['']",
        "generator.deterministic=maybe",
        "sampler.name=fifo",
        "name=two words",
        "name=../escape",
        "environment.options=[1]",
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_right_one(
    report: Report, override: str
) -> None:
    text = report(SMALL, override)
    key = override.partition("=")[0]
    assert f"override {override!r}: {key} = " in text
    assert "has to be: " in text
    assert text.startswith("1 problem in")


def test_a_section_cannot_be_a_plain_value(report: Report) -> None:
    text = report(f"{SMALL}sampler: in_order\nbuffer: 3")
    assert "sampler = 'in_order': has to be a section" in text
    assert "as in sampler: {name: in_order}" in text
    assert "It holds: capacity_groups, capacity_mib." in text


def test_a_bad_value_hides_no_clash_elsewhere_and_causes_none(report: Report) -> None:
    text = report(
        f"{SMALL}samples_per_group: 1\nsync: {{interval: -3}}\nbuffer: {{capacity_mib: x}}"
    )
    assert text.startswith("3 problems")
    assert "samples_per_group=1 gives" in text


# --- files ---------------------------------------------------------------------------------------


def test_a_syntax_error_has_line_and_column(report: Report) -> None:
    text = report("steps: 2\nmodel: {path: [x}\n")
    assert "recipe.yaml:2:17: not valid YAML" in text


def test_a_tab_is_a_syntax_error_with_a_hint(report: Report) -> None:
    text = report("model:\n\tpath: x\n")
    assert "recipe.yaml:2:1: not valid YAML" in text
    assert "no tabs" in text


def test_a_missing_recipe_names_its_neighbours(write: Write, tmp_path: Path) -> None:
    write(SMALL, "quickstart.yaml")
    write(SMALL, ".hooks.yaml")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "quikstart.yaml")
    text = str(caught.value)
    assert "quikstart.yaml cannot be read: No such file" in text
    assert f"Did you mean {tmp_path / 'quickstart.yaml'}?" in text
    assert "hooks" not in text
    assert "missing:" not in text


def test_a_missing_base_is_reported_where_it_is_asked_for(report: Report) -> None:
    text = report("seed: x\nextends: basis.yaml")
    assert "recipe.yaml:2: extends = " in text
    assert "basis.yaml cannot be read" in text
    assert "seed = 'x': has to be: integer" in text
    assert "required and missing" not in text, "it may be in the base"


def test_recipes_that_extend_each_other_are_named_in_a_circle(write: Write) -> None:
    write("extends: recipe.yaml", "other.yaml")
    path = write("extends: other.yaml")
    with pytest.raises(ConfigError, match=r"recipe\.yaml -> other\.yaml -> recipe\.yaml"):
        load_recipe(path)


def test_extends_takes_one_path(report: Report) -> None:
    assert "extends = [1]: has to be the path of one recipe" in report("extends: [1]")


@pytest.mark.parametrize("text", ["- steps", "steps"])
def test_a_recipe_is_a_mapping(report: Report, text: str) -> None:
    assert "a recipe is a mapping of keys to values" in report(text)


def test_a_recipe_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: caf\u00e9".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 text: byte 9 is 0xe9"):
        load_recipe(path)


def test_a_recipe_is_no_directory(tmp_path: Path) -> None:
    folder = tmp_path / "demo.yaml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="Is a directory") as caught:
        load_recipe(folder)
    assert "Did you mean" not in str(caught.value)


# --- hostile files -------------------------------------------------------------------------------


def test_a_tag_that_would_run_code_is_refused(report: Report) -> None:
    text = report(f"{SMALL}name: !!python/object/apply:os.getcwd []")
    assert "recipe.yaml:3: name: the tag tag:yaml.org,2002:python/object/apply:os.getcwd" in text


def test_aliases_cannot_multiply_without_bound(report: Report) -> None:
    levels = "\n".join(f"k{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9))
    text = report(f"k0: &a0 [x, x, x]\n{levels}")
    assert "too large once its aliases are followed" in text


def test_an_alias_of_itself_ends(report: Report) -> None:
    assert "too large once its aliases are followed" in report("a: &a [*a]")


def test_deep_nesting_is_refused_before_it_is_followed(report: Report) -> None:
    assert "nested deeper than" in report("a: " + "[" * 50_000)


def test_a_long_file_is_refused(report: Report) -> None:
    assert f"at most {MAX_TEXT_BYTES} are read" in report("#" * (MAX_TEXT_BYTES + 1))


def test_a_file_of_many_values_is_refused(report: Report) -> None:
    assert "too large" in report(f"a: [{'1,' * MAX_NODES}]")


@pytest.mark.parametrize("value", ["2026-02-31", "9" * 5000])
def test_a_value_no_python_type_holds_is_a_problem_with_its_line(
    report: Report, value: str
) -> None:
    assert "recipe.yaml:3: environment.options.x" in report(
        f"{SMALL}environment: {{options: {{x: {value}}}}}"
    )


def test_a_number_too_long_to_read_is_a_problem_once(report: Report) -> None:
    assert report(f"steps: {'9' * 5000}\nmodel: {{path: x}}").startswith("1 problem in")


def test_a_bad_override_is_quoted_back_with_the_way_to_write_it(report: Report) -> None:
    text = report(SMALL, "name=@x")
    assert "override 'name=@x': name = '@x': not valid YAML" in text
    assert """name='"..."'""" in text


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=1", ".a=1", "a.=1"])
def test_an_override_needs_a_dotted_key_and_a_value(report: Report, override: str) -> None:
    assert "Write key=value with a dotted key" in report(SMALL, override)


@pytest.mark.parametrize(
    "value", [".nan", "[1, -.inf]", "{deep: 1e999}", "2026-01-01", "!!binary aGk=", r'"\ud800"']
)
def test_an_option_that_would_reach_user_code_as_something_else_is_refused(
    report: Report, value: str
) -> None:
    text = report(SMALL, f"environment.options.x={value}")
    assert "environment.options" in text
    assert "of text, finite numbers, true, false, null, and lists or mappings of these" in text


def test_a_report_shows_no_secret_and_nothing_that_acts_on_a_terminal(report: Report) -> None:
    options = "environment.options={api_key: canary-3, x: .nan}"
    text = report('"a\\e[2J": 1\napi_key: canary-1\n', "environment.token=canary-2", options)
    assert "canary" not in text.replace(options, "")
    assert r"a\x1b[2J" in text and text.replace("\n", "").isprintable()


def test_a_section_of_another_library_is_translated_key_by_key(report: Report) -> None:
    text = report(
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, seed: 1, mop: 1}\n"
        "steps: 1\n"
    )
    assert [line.strip() for line in text.splitlines()[-5:]] == [
        "`grpo.num_prompts_per_step` is `groups_per_step` here.",
        "`grpo.num_generations_per_prompt` is `samples_per_group` here.",
        "`grpo.seed` is `seed` here.",
        "No counterpart is known of `grpo.mop`.",
        "More: docs/coming-from.md.",
    ]


def test_every_key_of_a_large_section_of_another_library_is_answered(report: Report) -> None:
    keys = [key for key in PEER_KEYS["verl"] if key.startswith("actor_rollout_ref.actor.optim.")]
    section = ", ".join(f"{key.rpartition('.')[2]}: 1" for key in keys)
    text = report(f"actor_rollout_ref: {{actor: {{optim: {{{section}}}}}}}\nsteps: 1\n")
    assert len(keys) > 8
    assert not [key for key in keys if f"`{key}` is `" not in text]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("actor_rollout_ref.rollout.stop=['8']", "is `generator.sampling.stop` here"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k=5", "an evaluation samples like training"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.5", "an evaluation samples like training"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0", "an evaluation samples like training"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "is `eval.samples` here"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "is `algorithm.loss.kl_reward_coef` here"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "is `algorithm.epochs` here"),
        ("actor_rollout_ref.actor.optim.weight_decay=0", "is `trainer.optimizer.weight_decay` here"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "is `algorithm.loss.kl_kind` here. Its"),
        ("actor_rollout_ref.actor.kl_loss_type=kl", "`kl` is `k1`, `mse` is `k2`, and `low_var_kl`"),
        ("async_training.require_batches=4", "is `groups_per_step` here. Multiply it by `ppo_mini_batch"),
        ("async_training.staleness_threshold=0.5", "0.5 with an interval of 4 gives 5"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp32", "keeps float32 master weights"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "It needs `trainer.backend=m"),
        ("critic.optim.lr=1e-5", "offbeat has no critic"),
        ("trainer.resume_mode=auto", "`offbeat.resume(RUN)`"),
        ("policy.generation.temperature=0.9", "is `generator.sampling.temperature` here"),
        ("policy.megatron_cfg.optimizer.lr=1e-5", "is `trainer.optimizer.learning_rate` here"),
        ("policy.dtensor_cfg.activation_checkpointing=true", "is `trainer.activation_checkpointing`"),
        ("trainer.optim.weight_decay=0", "is `trainer.optimizer.weight_decay` here"),
        ("orchestrator.eval.interval=5", "is `eval.interval` here"),
        ("inference.model.tp=2", "is `generator.vllm.tensor_parallel` here"),
        ("trainer.model.tp=2", "is `trainer.tensor_parallel` here"),
        ("generation_kwargs.top_p=0.9", "is `generator.sampling.top_p` here"),
        ("logging_steps=1", "each step is logged"),
        ("eval_strategy=steps", "is `eval.interval` here"),
    ],
)  # fmt: skip
def test_an_override_of_another_library_is_translated(
    report: Report, override: str, hint: str
) -> None:
    assert hint in report("steps: 1\n", override)


def test_keys_of_a_misspelt_section_are_not_taken_for_those_of_another_library(
    report: Report,
) -> None:
    assert "Did you mean `trainer`" in report("steps: 1\n", "trainr.weight_decay=0.1")
