import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from offbeat.config.loader import load_recipe, resolve_run_dir
from offbeat.config.problems import ConfigError
from offbeat.config.sections.sampler import InOrderConfig, ReadyFirstConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.yaml_text import to_yaml
from offbeat.plugins.megatron.section import MegatronTrainerConfig

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
SMALL = "steps: 2\nmodel: {path: ../models/tiny}\n"

Write = Callable[..., Path]


def test_the_quickstart_recipe_is_valid() -> None:
    assert load_recipe(QUICKSTART).config.name == "quickstart"


def test_the_quickstart_model_is_in_the_repository() -> None:
    assert (Path(load_recipe(QUICKSTART).config.model.path) / "config.json").is_file()


def test_what_a_recipe_leaves_out_has_its_default(write: Write) -> None:
    config = load_recipe(write(SMALL)).config
    assert (config.groups_per_step, config.sampler.name) == (16, "ready_first")


def test_an_empty_section_is_one_that_was_left_out(write: Write) -> None:
    config = load_recipe(write(f"{SMALL}trainer:\n  # threads: 2\n")).config
    assert config.trainer == TorchTrainerConfig(threads=1)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "'3e-4'", "3E-4", "+3e-4", ".3e-3"])
def test_a_learning_rate_is_a_number_however_it_is_written(write: Write, text: str) -> None:
    recipe = write(f"{SMALL}trainer: {{optimizer: {{learning_rate: {text}}}}}")
    assert load_recipe(recipe).config.trainer.optimizer.learning_rate == pytest.approx(3e-4)


def test_an_exponent_is_a_number_in_free_options_too(write: Write) -> None:
    recipe = write(f"{SMALL}environment: {{options: {{scale: 1e-3, label: '1e-3'}}}}")
    assert load_recipe(recipe).config.environment.options == {"scale": 0.001, "label": "1e-3"}


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    assert load_recipe(QUICKSTART, ["steps=1e3"]).config.steps == 1000


@pytest.mark.parametrize("text", ["16", "+16", "016", "0x10", "0b10000", "1_6", "'16'", "16.0"])
def test_a_leading_zero_does_not_change_a_number(write: Write, text: str) -> None:
    assert load_recipe(write(f"{SMALL}groups_per_step: {text}")).config.groups_per_step == 16


def test_a_time_or_a_number_with_a_leading_zero_is_text_in_free_options(write: Write) -> None:
    options = "{at: 12:30, of: 010, zip: 08540, half: 1:30.5, low: -1, high: 1_000, share: .5}"
    config = load_recipe(write(f"{SMALL}environment: {{options: {options}}}")).config
    assert config.environment.options == {
        "at": "12:30",
        "of": "010",
        "zip": "08540",
        "half": "1:30.5",
        "low": -1,
        "high": 1000,
        "share": 0.5,
    }


def test_a_time_is_no_number_of_groups(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"groups_per_step = '1:30': has to be: integer"):
        load_recipe(write(f"{SMALL}groups_per_step: 1:30"))


@pytest.mark.parametrize("key", ["trainer.optimizer.learning_rate", "sampler.max_staleness"])
def test_a_key_with_dots_in_a_recipe_is_refused_with_its_nested_form(
    write: Write, key: str
) -> None:
    first, *_, last = key.split(".")
    with pytest.raises(ConfigError, match=rf"{key} = 1: .* no dots(.|\n)*{first}: {{.*{last}: "):
        load_recipe(write(f"{SMALL}name: r\n{key}: 1"))


def test_a_merge_key_is_refused_for_what_it_is(write: Write) -> None:
    text = f"{SMALL}trainer: &t {{threads: 2}}\nalgorithm: {{<<: *t}}"
    with pytest.raises(ConfigError, match=r"merge key(.|\n)*extends"):
        load_recipe(write(text))


@pytest.mark.parametrize("text", ["007", "no", "2026-01-01", "1e5", "12"])
def test_text_is_taken_as_it_is_written(text: str) -> None:
    assert load_recipe(QUICKSTART, [f"name={text}"]).config.name == text


@pytest.mark.parametrize("text", ["</answer>", "8", "'8'", '"8"', "no", "1e3", "['8']"])
def test_one_stop_string_is_a_list_of_one_as_it_is_written(write: Write, text: str) -> None:
    written = (text.strip("[]'\""),)
    recipe = write(f"{SMALL}generator: {{sampling: {{stop: {text}}}}}")
    loaded = load_recipe(recipe).config
    assert loaded.generator.sampling.stop == written
    override = load_recipe(QUICKSTART, [f"generator.sampling.stop={text}"])
    assert override.config.generator.sampling.stop == written
    recorded = yaml.safe_load(to_yaml(loaded, {}))
    assert recorded["generator"]["sampling"]["stop"] == list(written)


# --- overrides -----------------------------------------------------------------------------------


def test_an_override_wins_over_the_recipe() -> None:
    assert load_recipe(QUICKSTART, ["steps=10"]).config.steps == 10


def test_the_last_of_two_overrides_wins() -> None:
    assert load_recipe(QUICKSTART, ["steps=10", "steps=11"]).config.steps == 11


@pytest.mark.parametrize("turn", [1, -1])
def test_options_and_the_name_they_belong_to_come_in_any_order(write: Write, turn: int) -> None:
    overrides = ["environment.options.low=3", "environment.name=function"]
    overrides += ["environment.target=m:f", "data.path=prompts.jsonl"]
    path = write("steps: 1\nmodel: {path: .}\nenvironment: {options: {high: 9}}\n")
    loaded = load_recipe(path, overrides[::turn], dry_run=True)
    assert loaded.config.environment.options == {"low": 3}


def test_an_override_reaches_deep() -> None:
    config = load_recipe(QUICKSTART, ["generator.sampling.temperature=0.5"]).config
    assert config.generator.sampling.temperature == 0.5
    assert config.generator.sampling.max_new_tokens == 4, "the recipe's neighbour is kept"


def test_an_override_may_hold_a_list_or_a_mapping() -> None:
    config = load_recipe(
        QUICKSTART, ["generator.sampling.stop_token_ids=[1, 2]", "environment.options={low: 5}"]
    ).config
    assert config.generator.sampling.stop_token_ids == (1, 2)
    assert config.environment.options == {"low": 5, "high": 20}


def test_an_empty_override_is_null() -> None:
    config = load_recipe(QUICKSTART, ["trainer.optimizer.max_grad_norm="]).config
    assert config.trainer.optimizer.max_grad_norm is None


def test_a_value_may_hold_an_equals_sign() -> None:
    recipe = load_recipe(QUICKSTART, ["wandb.project=a=b"]).config.model_dump()
    assert recipe["wandb"]["project"] == "a=b"


def test_each_value_knows_where_it_was_given() -> None:
    origins = load_recipe(QUICKSTART, ["steps=10"]).origins
    assert str(origins["steps"]) == "override 'steps=10'"
    assert str(origins["seed"]).endswith("quickstart.yaml:3")
    assert "sync.interval" not in origins


# --- a choice by name ----------------------------------------------------------------------------

AHEAD = f"{SMALL}sampler: {{name: in_order, max_staleness: 2, max_lookahead: 1}}\n"


def test_another_choice_keeps_what_both_have_and_drops_what_only_the_old_one_has(
    write: Write,
) -> None:
    loaded = load_recipe(write(AHEAD), ["sampler.name=ready_first"])
    assert loaded.config.sampler == ReadyFirstConfig(name="ready_first", max_staleness=2)
    assert [key.partition(" ")[0] for key in loaded.dropped] == ["sampler.max_lookahead"]


ADAPTERS = f"{SMALL}trainer: {{backend: torch, lora: {{rank: 4}}}}\n"


def test_a_backend_without_adapters_is_refused_where_a_recipe_below_sets_them(write: Write) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(write(ADAPTERS), ["trainer.backend=megatron"])
    assert "trainer.backend=megatron has no `lora`" in str(refused.value)
    whole = load_recipe(write(ADAPTERS), ["trainer.backend=megatron", "trainer.lora=null"])
    assert isinstance(whole.config.trainer, MegatronTrainerConfig)


FROZEN = f"{SMALL}trainer: {{backend: torch, freeze: [lm_head.*]}}\n"


def test_another_backend_freezes_what_a_recipe_below_freezes(write: Write) -> None:
    trainer = load_recipe(write(FROZEN), ["trainer.backend=megatron"]).config.trainer
    assert isinstance(trainer, MegatronTrainerConfig)
    assert trainer.freeze == ("lm_head.*",)


def test_the_same_choice_again_drops_nothing(write: Write) -> None:
    loaded = load_recipe(write(AHEAD), ["sampler.name=in_order"])
    assert loaded.config.sampler == InOrderConfig(name="in_order", max_staleness=2, max_lookahead=1)


def test_a_choice_that_gives_no_name_speaks_of_the_default_one(write: Write) -> None:
    sampler = load_recipe(write(SMALL), ["sampler.max_staleness=3"]).config.sampler
    assert sampler == ReadyFirstConfig(name="ready_first", max_staleness=3)


def test_another_environment_does_not_inherit_the_options_of_the_old_one() -> None:
    loaded = load_recipe(QUICKSTART, ["environment.name=stub"], dry_run=True)
    assert loaded.config.environment.options == {}


# --- extends -------------------------------------------------------------------------------------


def test_a_recipe_extends_another_key_by_key(write: Write) -> None:
    write(f"{SMALL}seed: 7\ntrainer: {{threads: 2, step_retries: 3}}", "base.yaml")
    loaded = load_recipe(write("extends: base.yaml\nsteps: 9\ntrainer: {threads: 4}"))
    assert (loaded.config.steps, loaded.config.seed) == (9, 7)
    assert loaded.config.trainer == TorchTrainerConfig(threads=4, step_retries=3)
    assert [path.name for path in loaded.sources] == ["base.yaml", "recipe.yaml"]


def test_extends_goes_on_through_a_chain(write: Write) -> None:
    write(f"{SMALL}seed: 1\ngroups_per_step: 5", "a.yaml")
    write("extends: ../a.yaml\nseed: 2\nname: b", "folder/b.yaml")
    config = load_recipe(write("extends: folder/b.yaml\nname: c")).config
    assert (config.groups_per_step, config.seed, config.name) == (5, 2, "c")


# --- paths ---------------------------------------------------------------------------------------


def test_a_path_is_relative_to_the_recipe(write: Write, tmp_path: Path) -> None:
    config = load_recipe(write(SMALL, "recipes/r.yaml")).config
    assert config.model.path == str(tmp_path / "models" / "tiny")


def test_an_inherited_path_is_relative_to_the_recipe_that_names_it(
    write: Write, tmp_path: Path
) -> None:
    write("steps: 1\nmodel: {path: tiny}", "deep/base.yaml")
    config = load_recipe(write("extends: deep/base.yaml")).config
    assert config.model.path == str(tmp_path / "deep" / "tiny")


def test_a_path_in_an_override_is_relative_to_the_working_directory() -> None:
    config = load_recipe(QUICKSTART, ["model.path=./some/model"]).config
    assert config.model.path == str(Path.cwd() / "some" / "model")


def test_a_tilde_is_the_home_directory_in_a_recipe_in_what_it_extends_and_in_an_override(
    write: Write,
) -> None:
    home = Path.home()
    recipe = write("""\
        steps: 1
        run_dir: ~/runs/{name}
        model: {path: ~/models/m}
        environment: {name: function, target: 'm:f'}
        data: {path: ~/data.jsonl}
        eval: {interval: 1, sets: {math: {path: ~/math.jsonl}}}
    """)
    assert load_recipe(recipe).config.data.path == str(home / "data.jsonl")
    config = load_recipe(recipe, ["data.path=~/rows.jsonl"]).config
    assert resolve_run_dir(config) == home / "runs" / config.name
    assert config.model.path == str(home / "models/m")
    assert config.eval.sets["math"].path == str(home / "math.jsonl")
    assert config.data.path == str(home / "rows.jsonl")
    assert resolve_run_dir(load_recipe(recipe, ["run_dir=~/else"]).config) == home / "else"
    with pytest.raises(ConfigError, match=re.escape(str(home / "no-such-base.yaml"))):
        load_recipe(write("extends: ~/no-such-base.yaml"))


def test_a_home_of_nobody_is_refused_and_no_directory_of_that_name_is_meant(write: Write) -> None:
    with pytest.raises(ConfigError, match="there is no such home directory"):
        load_recipe(write(f"{SMALL}run_dir: ~nobody-of-this-name/runs\n"))
    config = load_recipe(write(f"{SMALL}run_dir: ./~runs\n")).config
    assert resolve_run_dir(config) == Path.cwd() / "~runs"


def test_an_absolute_path_stays(write: Write) -> None:
    assert load_recipe(write("steps: 1\nmodel: {path: /m/x}")).config.model.path == "/m/x"


def test_the_run_directory_takes_the_name_of_the_run() -> None:
    config = load_recipe(QUICKSTART, ["name=first"]).config
    assert resolve_run_dir(config) == Path.cwd() / "runs" / "first"


def test_sections_by_name_are_merged_by_name_and_their_paths_are_of_the_file_that_names_them(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base" / "base.yaml"
    base.parent.mkdir()
    base.write_text(
        "steps: 1\nmodel: {path: m}\nenvironment: {name: function, target: 'm:f'}\n"
        "data: {path: rows.jsonl}\n"
        "eval: {interval: 5, samples: 4, sets: {math: {path: math.jsonl}, code: {path: 007}}}\n"
    )
    top = tmp_path / "top.yaml"
    top.write_text("extends: base/base.yaml\neval: {sets: {math: {prompts: 9}, new: {path: n}}}\n")
    config = load_recipe(top, ["eval.sets.code.samples=2"]).config
    sets = config.eval.named_sets
    assert {name: (each.path, each.prompts, each.samples) for name, each in sets.items()} == {
        "math": (str(base.parent / "math.jsonl"), 9, 4),
        "code": (str(base.parent / "007"), 64, 2),
        "new": (str(tmp_path / "n"), 64, 4),
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.sets.math.promts=3", "eval.sets.math.promts = 3: unknown key"),
        ("eval.sets.math.prompts=0", "eval.sets.math.prompts = 0: has to be: integer, at least 1"),
        ("eval.sets.math=3", "eval.sets.math = 3: has to be a section"),
        ("eval.sets=3", "eval.sets = 3: has to be: sections by name"),
        ("eval.sets.my set.prompts=3", "has to be: section, NAME of letters, digits"),
    ],
)
def test_what_is_wrong_below_a_chosen_name_is_named(
    tmp_path: Path, override: str, message: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\nmodel: {path: m}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, [override])
    assert message in str(caught.value)
