# pyright: basic
# Annotations are taken apart here, and they can be any object.
"""Written, read, laid over one another: configurations stay what they are."""

from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offbeat.config.loader import load_recipe
from offbeat.config.presets import PRESETS
from offbeat.config.run import RunConfig
from offbeat.config.schema import known_keys
from offbeat.config.secrets import REDACTED
from offbeat.config.sections.generator import NoGeneratorConfig
from offbeat.config.yaml_text import RecipeDumper, to_yaml

TRICKY = [
    "yes",
    "no",
    "~",
    "null",
    "3e-4",
    "1e3",
    "0x1F",
    "1:30",
    "2026-01-01",
    "=",
    "<<",
    "007",
    "",
]
TEXT = st.sampled_from(TRICKY) | st.text(max_size=8)
PATHS = st.from_regex(r"/[a-z]{1,6}(/[a-z0-9]{1,6}){0,2}", fullmatch=True)


OPTIONS = st.fixed_dictionaries({"low": st.integers(), "text": TEXT})
SAMPLERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "in_order": {},
    "ready_first": {},
    "weight_fifo": {},
    "windowed": {
        "over_sampling_ratio": st.floats(1, 4),
        "freshest_first": st.booleans(),
        "on_evicted": st.sampled_from(["readmit", "drop"]),
    },
    "custom": {"target": st.sampled_from(["mine:Policy", "a.b:C"]), "options": OPTIONS},
}


def sampler(draw: st.DrawFn) -> dict[str, Any]:
    name, staleness = draw(st.sampled_from(list(SAMPLERS))), draw(st.integers(3, 9))
    own = draw(st.fixed_dictionaries(SAMPLERS[name]))
    if name == "in_order":
        own["max_lookahead"] = draw(st.none() | st.integers(0, staleness))
    return {"name": name, "max_staleness": staleness, **own}


# Free values of these would clash with one another; here they are chosen so that they do not.
CHOSEN: dict[str, st.SearchStrategy[Any]] = {
    "run_dir": st.sampled_from(["runs/{name}", "/disk/x y"]),
    "name": st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,9}", fullmatch=True),
    "groups_per_step": st.integers(1, 20),
    "samples_per_group": st.integers(2, 20),
    "model.path": PATHS,
    "model.weights": st.none() | PATHS,
    "data.path": st.none(),
    "data.columns": st.just({}),  # of a file
    "environment.name": st.sampled_from(["arithmetic", "stub"]),
    "environment.target": st.none(),
    "environment.options": OPTIONS,
    "environment.rewards": st.just({}),
    "environment.command": st.just(()),
    "environment.reward_concurrency": st.just(
        64
    ),  # this one and the next three for an async reward
    "environment.reward_retries": st.just(0),
    "environment.reward_retry_on": st.just(()),
    "environment.reward_calls_per_s": st.none(),
    "environment.variables": st.just(()),  # for an agent alone, as the next two
    "environment.renderer": st.just({}),
    "environment.images": st.none(),  # a section that an override cannot take out again
    "environment.episodes_per_child": st.none(),
    "environment.episode_deadline_s": st.none(),
    "sampler": st.composite(sampler)(),
    "algorithm.loss.target": st.sampled_from(["mine:loss", "a.b:loss"]),
    "algorithm.loss.options": OPTIONS,
    "buffer.capacity_groups": st.none() | st.integers(800, 999),  # what the widest sampler admits
    "buffer.capacity_mib": st.floats(4096, 9999),
    "rollout.branches": st.just("train"),  # these three for an agent alone
    "rollout.max_sample_tokens": st.none(),
    "rollout.max_branches": st.just(64),
    "rollout.overlong_tokens": st.none(),
    "rollout.overlong_penalty": st.just(1.0),
    "rollout.reward_call_budget": st.none(),  # this one and the next for a reward function alone
    "rollout.on_reward_budget_spent": st.just("fail"),
    "rollout.max_in_flight": st.none() | st.just(1),
    "rollout.min_valid_samples": st.none(),
    "rollout.backoff_s": st.floats(0.01, 1),
    "rollout.backoff_max_s": st.floats(1, 9),
    "generator.deterministic": st.just(value=False),
    "generator.min_engines": st.just(1),
    "generator.max_model_len": st.integers(65, 4096),
    "generator.sampling.max_new_tokens": st.integers(1, 64),
    "generator.sampling.stop": st.lists(TEXT.filter(bool), max_size=2),
    "generator.vllm.engine_args": OPTIONS,
    "algorithm.advantage": st.sampled_from(["grpo", "rloo", "pass_at_k", "mine:advantage"]),
    "algorithm.pass_k": st.just(1),
    "algorithm.minibatches": st.just(1),  # this one and the next beside what they clash with
    "algorithm.epochs": st.just(1),
    "algorithm.loss.tis_cap": st.none(),
    "algorithm.loss.dual_clip": st.none(),
    "algorithm.loss.sequence_cap": st.none(),
    "algorithm.loss.kl_gradient": st.just("estimator"),
    "algorithm.loss.kl_kind": st.just("k3"),
    "algorithm.loss.kl_clamp": st.none(),
    "algorithm.loss.icepop_band": st.none(),
    "algorithm.loss.sequence_band": st.none(),
    "algorithm.loss.sequence_weights": st.just(value=False),
    "algorithm.loss.constant_tokens": st.none(),
    "algorithm.loss.teacher": st.none(),
    "algorithm.loss.teacher_coef": st.just(1.0),  # this one and the next beside a teacher
    "algorithm.loss.teacher_reward_coef": st.just(0.0),
    "algorithm.loss.step_std": st.just(value=False),
    "environments": st.just({}),  # in place of the single one
    "eval.path": st.none(),
    "eval.columns": st.just({}),
    "eval.sets": st.just({}),  # of two recipes they are joined by name
    "eval.at_start": st.just(value=False),  # needs an interval
    "runtime.env": st.fixed_dictionaries({"HF_HOME": TEXT.filter(lambda text: "\0" not in text)}),
    "trainer.optimizer.schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "trainer.optimizer.min_learning_rate": st.just(0.0),
    "trainer.optimizer.decay_steps": st.none(),
    "trainer.optimizer.decay_samples": st.none(),
    "trainer.optimizer.warmup_samples": st.none(),
    "trainer.data_parallel": st.integers(1, 64),  # this one and the next three: ranks of one world
    "trainer.tensor_parallel": st.integers(1, 8),
    "trainer.context_parallel": st.integers(1, 8),
    "trainer.pipeline_parallel": st.integers(1, 8),
    "trainer.expert_parallel": st.just(
        1
    ),  # this one and the next two go with the sizes of the others
    "trainer.expert_tensor_parallel": st.just(1),
    "trainer.layers_per_stage": st.none(),
    "trainer.optimizer.rounding": st.just("nearest"),  # random: one rank of torch, in bfloat16
    "trainer.encoder": st.none(),  # as the next one
    "trainer.lora": st.none(),  # a section that an override cannot take out again
    "trainer.moe.load_balancing_coef": st.just(
        0.0
    ),  # this one and the next go with a loss over tokens
    "trainer.moe.z_loss_coef": st.just(0.0),
    "trainer.freeze": st.sampled_from([(), ("model.visual.*",)]),
    "sync.interval": st.integers(1, 4),
    "sync.deadline_s": st.floats(500, 999),
    "sync.chunk_mib": st.floats(1, 64),
    "sync.slowest_mib_s": st.floats(10, 99),
    "sync.slack_s": st.floats(0.1, 9),
    "sync.wire_dtype": st.none(),
    "plugins": st.just({}),  # of packages that are installed
    "wandb.group": st.none() | st.from_regex(r"[a-z0-9 ]{1,8}", fullmatch=True),
    "wandb.tags": st.lists(st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True), max_size=3).map(tuple),
    "sync.delta": st.sampled_from([False]),  # refused beside some wires
}


def values(annotation: Any, marks: list[Any]) -> st.SearchStrategy[Any]:
    """Any value the annotation takes."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for mark in parts[1:] for m in getattr(mark, "metadata", [mark])]
        return values(parts[0], [*marks, *inner])
    if origin in (Union, UnionType):
        return st.one_of([values(part, marks) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple:
        some = st.lists(values(parts[0], []), max_size=3).map(tuple)
        return some if Ellipsis in parts else st.tuples(*[values(part, []) for part in parts])
    if annotation in (int, float):
        return numbers(annotation, marks)
    return {bool: st.booleans(), str: TEXT, NoneType: st.none()}[annotation]


def numbers(kind: type, marks: list[Any]) -> st.SearchStrategy[Any]:
    low: Any = next((m.ge for m in marks if isinstance(m, Ge)), None)
    above: Any = next((m.gt for m in marks if isinstance(m, Gt)), None)
    high: Any = next((m.le for m in marks if isinstance(m, Le)), None)
    below: Any = next((m.lt for m in marks if isinstance(m, Lt)), None)
    if kind is int:
        return st.integers(low, high)
    return st.floats(
        min_value=low if above is None else above,
        max_value=high if below is None else below,
        exclude_min=above is not None,
        exclude_max=below is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def sections(model: type[BaseModel], prefix: str = "") -> st.SearchStrategy[dict[str, Any]]:
    """Any section of this kind, but for the generator that only a file goes with."""

    def field(name: str, info: FieldInfo) -> st.SearchStrategy[Any]:
        if (key := f"{prefix}{name}") in CHOSEN:
            return CHOSEN[key]
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            return sections(info.annotation, f"{key}.")
        if info.discriminator:
            kinds = [each for each in get_args(info.annotation) if each is not NoGeneratorConfig]
            return st.one_of([sections(kind, f"{key}.") for kind in kinds])
        return values(info.annotation, list(info.metadata))

    return st.fixed_dictionaries(
        {name: field(name, info) for name, info in model.model_fields.items()}
    )


def fitting(values: dict[str, Any]) -> dict[str, Any]:
    """Take out a preset of another loss; to draw everything again would take longer."""
    preset, loss = values["algorithm"]["preset"], values["algorithm"]["loss"]
    if preset is None or PRESETS[preset]["loss"]["name"] == loss["name"]:
        return values
    return {**values, "algorithm": {**values["algorithm"], "preset": None}}


CONFIGS = sections(RunConfig).map(fitting).map(RunConfig.model_validate)

# The temporary folder is written over by every example, which is all it is for.
written_over = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def written(folder: Path, config: RunConfig, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(to_yaml(config, {}), encoding="utf-8")
    return path


@written_over
@given(config=CONFIGS)
def test_a_dump_loads_as_an_equal_configuration(tmp_path: Path, config: RunConfig) -> None:
    assert load_recipe(written(tmp_path, config), dry_run=True).config == config


@written_over
@given(base=CONFIGS, top=CONFIGS)
def test_a_whole_recipe_laid_over_another_is_that_recipe(
    tmp_path: Path, base: RunConfig, top: RunConfig
) -> None:
    written(tmp_path, base, "base.yaml")
    path = written(tmp_path, top)
    path.write_text(f"extends: base.yaml\n{path.read_text('utf-8')}", encoding="utf-8")
    assert load_recipe(path, dry_run=True).config == top


@written_over
@given(base=CONFIGS, top=CONFIGS, data=st.data())
def test_overriding_every_key_in_any_order_gives_the_other_configuration(
    tmp_path: Path, base: RunConfig, top: RunConfig, data: st.DataObject
) -> None:
    dumped = top.model_dump(mode="json")
    leaves = [key for key, known in known_keys().items() if not known.sections]
    overrides = [f"{key}={flow(dumped, key)}" for key in leaves if key in flat(dumped)]
    shuffled = data.draw(st.permutations(overrides))
    assert load_recipe(written(tmp_path, base), shuffled, dry_run=True).config == top


def flat(dumped: dict[str, Any], prefix: str = "") -> set[str]:
    found = {f"{prefix}{name}" for name in dumped}
    for name, value in dumped.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
    return found


def flow(dumped: dict[str, Any], key: str) -> str:
    """One value as a shell would pass it: YAML on one line."""
    value: Any = reduce(lambda section, name: section[name], key.split("."), dumped)
    text = yaml.dump(value, Dumper=RecipeDumper, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


@pytest.mark.parametrize(
    "text",
    [
        *TRICKY,
        "a: b",
        "# c",
        "'",
        '"',
        "\u2028",
        "\x85",
        "\x07",
        "\r",
        "a\nb ",
        "\ufeff",
        "[",
        "- x",
    ],
)
def test_text_in_options_stays_text(tmp_path: Path, text: str) -> None:
    values = {"steps": 1, "model": {"path": "/x"}, "environment": {"options": {"text": text}}}
    config = RunConfig.model_validate(values)
    assert load_recipe(written(tmp_path, config)).config == config


# --- secrets -------------------------------------------------------------------------------------


def dumped_options(options: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    values = {"steps": 1, "model": {"path": "/x"}, "environment": {"options": options}}
    return yaml.safe_load(to_yaml(RunConfig.model_validate(values), environ))["environment"][
        "options"
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "API_KEY", "openai_api_key", "secret", "db-password", "apikey"),
        *("accessToken", "aws_secret_access_key", "private-key", "passphrase", "Authorization"),
    ],
)
@pytest.mark.parametrize("value", ["canary", 31415926, ["canary"]])
def test_a_value_whose_key_says_secret_is_not_written(key: str, value: object) -> None:
    redacted = [REDACTED] if isinstance(value, list) else REDACTED
    assert dumped_options({"deep": {key: value}}, {}) == {"deep": {key: redacted}}


def test_whatever_stands_below_a_key_that_says_secret_is_not_written() -> None:
    options = {"credentials": {"user": "ada", "id": 7}, "db": "https://ada:canary@host/"}
    redacted = {"credentials": {"user": REDACTED, "id": 7}, "db": REDACTED}
    assert dumped_options(options, {}) == redacted


@pytest.mark.parametrize(
    "option", [{"max_tokens": 3}, {"eos_token": "</s>"}, {"tokenizer": "x"}, {"secretary": "Ada"}]
)
def test_a_value_that_only_sounds_like_one_is_written(option: dict[str, Any]) -> None:
    assert dumped_options(option, {}) == option


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"]
)
def test_the_value_of_a_secret_variable_is_not_written_anywhere(name: str) -> None:
    options = {"url": "https://u:canary-123@host", "list": ["canary-123"]}
    assert dumped_options(options, {name: "canary-123"}) == {"url": REDACTED, "list": [REDACTED]}


def test_a_variable_that_is_a_switch_redacts_nothing() -> None:
    assert dumped_options({"x": "1"}, {"USE_TOKEN": "1", "HOME": "canary"}) == {"x": "1"}
