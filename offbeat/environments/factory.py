"""Creates a prompt source and an environment from the config sections."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from offbeat.config.by_value import pack
from offbeat.config.environment_traits import find_traits
from offbeat.config.graders import GRADERS, reward_target
from offbeat.config.mixture import environment_views, environment_weights, inputs_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig, RewardConfig
from offbeat.config.sections.eval import EvalSetConfig
from offbeat.config.user_code import load_target
from offbeat.environments.async_calls import CallLimits
from offbeat.environments.built_in import Arithmetic, StubEnvironment
from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.environment_plugin import PluginOfEnvironments, find_environment
from offbeat.environments.exits import exits_as_errors
from offbeat.environments.frames import RewardTarget
from offbeat.environments.function_reward import FunctionReward, WeightedRewards
from offbeat.environments.gsm8k import Gsm8k, Gsm8kOptions
from offbeat.environments.held_out import check_one_split
from offbeat.environments.inputs import (
    DATA,
    ENVIRONMENT,
    check_same,
    eval_key,
    source_digest,
)
from offbeat.environments.prompt_files import FilePrompts, prompt_files, refuse_packed_files
from offbeat.environments.prompts import (
    ArithmeticOptions,
    ArithmeticPrompts,
    EnvironmentPrompts,
    MixedPrompts,
    PromptSource,
    StubPrompts,
)
from offbeat.environments.protocol import Environment, MultiTurn, SingleTurn
from offbeat.environments.row_checks import row_check, shown_part
from offbeat.environments.text import Tokenizer
from offbeat.messages.failures import OffbeatError

_Options = TypeVar("_Options", bound=msgspec.Struct)
_STUB_ROWS: Final = 1024
_SHARE_OF_DEADLINE: Final = 0.9
"""Fraction of the deadline at which an async call is cancelled, so that its process survives."""

_REWARD_MEMORY_MIB: Final = 2048
"""Memory limit of a process that runs Python code, if the recipe sets none."""

_HERE: Final = Path()

_NO_DIGESTS: Final[Mapping[str, str]] = MappingProxyType({})


class BadEnvironment(OffbeatError):
    """The config names an environment that cannot be created.

    Fix: correct the named key of ``environment``.
    """

    key: str
    problem: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}"


def make_prompts(
    config: RunConfig,
    began_with: Mapping[str, str] = _NO_DIGESTS,
    working_dir: Path = _HERE,
) -> PromptSource:
    """Create the prompt source of the run: ``data.path``, or the environment's built-in prompts.

    ``began_with`` maps recipe keys to the digests that the run's inputs had at its start, and paths
    on the hub to their commits. ``working_dir`` is searched first for the modules of a taskset.

    Raises:
        HubFilesError: Files on the hub cannot be fetched.
        InputChanged: The file has changed since the run began.
        PromptFileError: The file cannot be used.
        BadEnvironment: The environment has no built-in prompts, or cannot use its options.
    """
    if config.environments:
        sources = {
            name: make_prompts(view, inputs_in(name, began_with), working_dir)
            for name, view in environment_views(config).items()
        }
        return MixedPrompts(sources, environment_weights(config), config.seed)
    data, name = config.data, config.environment.name
    if name == "gsm8k":  # report a mistake in the options before anything starts
        read_options(config.environment, Gsm8kOptions)
    if data.path is not None:
        return _file_prompts(config, DATA, data, began_with, data.epochs, shuffle=data.shuffle)
    if (made := _made_prompts(config)) is not None:
        return made
    plugin = find_environment(name)
    if plugin is not None:
        made = plugin.make_prompts(config, began_with, working_dir)
        if made is not None:
            return made
    raise BadEnvironment("data.path", f"environment {name!r} makes no prompts; name a file")


def _made_prompts(config: RunConfig) -> PromptSource | None:
    """Return the prompts of a core environment that makes its prompts, or None."""
    shuffle, epochs = config.data.shuffle, config.data.epochs
    order: dict[str, Any] = {"shuffle": shuffle, "seed": config.seed, "epochs": epochs}
    match config.environment.name:
        case "stub":
            return StubPrompts(_STUB_ROWS, **order)
        case "arithmetic":
            terms = read_options(config.environment, ArithmeticOptions)
            try:
                return ArithmeticPrompts(terms.low, terms.high, **order)
            except ValueError as error:
                raise BadEnvironment("environment.options", str(error)) from error
        case _:
            return None


def make_evaluation_sets(
    config: RunConfig,
    began_with: Mapping[str, str] = _NO_DIGESTS,
    working_dir: Path = _HERE,
) -> dict[str, PromptSource]:
    """Create the prompt source of each set in ``eval``, each with its own order.

    The result is empty without evaluations.

    Raises:
        HubFilesError: Files on the hub cannot be fetched.
        InputChanged: A file has changed since the run began.
        PromptFileError: A file cannot be used.
    """
    if not config.eval.interval:
        return {}
    if config.environments:
        views = environment_views(config)
        sources = {
            name: make_evaluation_sets(view, inputs_in(name, began_with), working_dir)[""]
            for name, view in views.items()
        }
        return {name: EnvironmentPrompts(name, each) for name, each in sources.items()}
    return {
        name: _evaluation_prompts(config, name, each, began_with, working_dir)
        for name, each in config.eval.named_sets.items()
    }


def _evaluation_prompts(
    config: RunConfig,
    name: str,
    one: EvalSetConfig,
    began_with: Mapping[str, str],
    working_dir: Path,
) -> PromptSource:
    if one.path is not None:
        return _file_prompts(config, eval_key(name), one, began_with, 1, shuffle=False)
    plugin = find_environment(config.environment.name)
    held_out = None if plugin is None else plugin.make_held_out_prompts(config)
    if held_out is not None:
        return held_out
    # One epoch: a short source yields no row twice
    once = config.data.model_copy(update={"epochs": 1})
    return make_prompts(config.model_copy(update={"data": once}), began_with, working_dir)


def make_environment(
    config: EnvironmentConfig,
    tokenizer: Tokenizer | None,
    working_dir: Path,
    began_with: Mapping[str, str] = _NO_DIGESTS,
) -> Environment:
    """Create the environment of one worker, before its ``start``.

    ``tokenizer`` is the model's tokenizer, and None only for the stub. ``working_dir`` is searched
    first for ``environment.target``. ``began_with`` maps recipe keys to the digests that the run's
    inputs had at its start.

    Raises:
        BadEnvironment: The environment lacks something it needs, or an option has the wrong type.
        TargetNotFound: A custom environment cannot be imported.
        InputChanged: Its source has changed since the run began.
        NoChatTemplate: The environment needs a chat template, and the tokenizer has none.
    """
    if config.name == "stub":
        return StubEnvironment(config)
    if tokenizer is None:
        raise BadEnvironment("model.path", f"environment {config.name!r} needs a tokenizer")
    built_in = _built_in(config, tokenizer, working_dir)
    if built_in is not None:
        return built_in
    if config.rewards:
        return WeightedRewards(
            {
                name: (
                    each.weight,
                    _function(config, key, each, tokenizer, working_dir, began_with),
                )
                for (name, each), key in zip(config.rewards.items(), config.targets, strict=True)
            }
        )
    if config.target is None:
        raise BadEnvironment(
            "environment.target", f"environment {config.name!r} needs it; name module:name"
        )
    if config.is_agent:
        raise BadEnvironment("environment.name", "an agent is made by make_agent")
    if config.name == "function":
        one = RewardConfig(target=config.target, options=config.options)
        return _function(config, ENVIRONMENT, one, tokenizer, working_dir, began_with)
    source = source_digest(config.target, working_dir)
    check_same(ENVIRONMENT, config.target, source, began_with)
    return _custom(config, config.target, tokenizer, working_dir)


def _function(
    config: EnvironmentConfig,
    key: str,
    reward: RewardConfig,
    tokenizer: Tokenizer,
    working_dir: Path,
    began_with: Mapping[str, str],
) -> FunctionReward:
    source, may_be_none = began_with.get(key, ""), key != ENVIRONMENT
    given = {"options": reward.options, "may_be_none": may_be_none}
    target = make_reward_target(config, reward.target, working_dir, source, **given)
    grades = {"is_counted": False, "ignores_thinking": True} if reward.target in GRADERS else {}
    return FunctionReward(tokenizer, target, config.reward_workers, **grades)


def _built_in(
    config: EnvironmentConfig, tokenizer: Tokenizer, working_dir: Path
) -> Environment | None:
    """Return the environment that the name selects, or None if the user provides the class."""
    match config.name:
        case "arithmetic":
            return Arithmetic(tokenizer)
        case "gsm8k":
            return Gsm8k(tokenizer, read_options(config, Gsm8kOptions))
        case "demonstrations":
            return Demonstrations(tokenizer)
        case _:
            plugin = find_environment(config.name)
            if not isinstance(plugin, PluginOfEnvironments):
                return None
            return plugin.make_environment(config, tokenizer, working_dir)


def _file_prompts(
    config: RunConfig,
    key: str,
    source: DataConfig | EvalSetConfig,
    began_with: Mapping[str, str],
    epochs: int | None,
    *,
    shuffle: bool,
) -> FilePrompts:
    files = prompt_files(path := str(source.path), began_with)
    refuse_packed_files(path)
    check_one_split(config, path, files)
    prompts = FilePrompts(
        files,
        shuffle=shuffle,
        seed=config.seed,
        epochs=epochs,
        columns=source.columns,
        problem_of=row_check(config.environment),
        shown_of=shown_part(config.environment),
    )
    check_same(key, path, prompts.digest, began_with)
    return prompts


def read_options(config: EnvironmentConfig, kind: type[_Options]) -> _Options:
    """Return ``environment.options`` as an instance of ``kind``.

    Raises:
        BadEnvironment: The options have unknown keys or wrong types.
    """
    try:
        return msgspec.convert(config.options, kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(kind.__struct_fields__)
        problem = f"{error}; environment.name={config.name} reads {fields}"
        raise BadEnvironment("environment.options", problem) from error


def make_reward_target(
    config: EnvironmentConfig,
    target: str,
    working_dir: Path,
    source: str = "",
    **changes: Any,  # noqa: ANN401 - of the fields of a target
) -> RewardTarget:
    """Return the reward target for a function, with the recipe's limits for its children."""
    processes, rate = config.workers * config.reward_workers, config.reward_calls_per_s
    limits = CallLimits(
        deadline_s=_SHARE_OF_DEADLINE * config.reward_deadline_s,
        concurrency=config.reward_concurrency,
        calls_per_s=None if rate is None else rate / processes,
        retries=config.reward_retries,
        retry_on=config.reward_retry_on,
    )
    made = RewardTarget(
        target=reward_target(target),
        working_dir=working_dir,
        options=config.options,
        memory_mib=config.reward_memory_mib or _REWARD_MEMORY_MIB,
        deadline_s=config.reward_deadline_s,
        start_s=config.reward_start_s,
        source=source,
        limits=limits,
        value=next(iter(pack([target])), None),
        form=find_traits(config.name).call_form,
    )
    return replace(made, **changes)


def _custom(
    config: EnvironmentConfig, target: str, tokenizer: Tokenizer, working_dir: Path
) -> Environment:
    make = load_target(target, working_dir, find_traits(config.name).call_form, config.options)
    with exits_as_errors():
        environment: object = make(tokenizer, **config.options)
    if not isinstance(environment, SingleTurn | MultiTurn):
        got = type(environment).__name__
        raise BadEnvironment(
            "environment.target",
            f"{target} makes a {got}; subclass SingleTurn or MultiTurn of "
            "offbeat.environments.protocol",
        )
    return environment
