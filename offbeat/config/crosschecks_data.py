"""Sources of prompts that cannot work."""

from collections.abc import Callable, Iterator

from offbeat.config.clash import Clash
from offbeat.config.hub_path import FORM, READABLE, hub_path, is_on_hub
from offbeat.config.mixture import environment_views, text_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import MAKE_PROMPTS, EnvironmentConfig


def data_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield environments without prompts, files that nothing reads, and paths that name none."""
    yield from _prompts_have_one_source(config)
    yield from _paths_on_the_hub_name_files(config)


def _paths_on_the_hub_name_files(config: RunConfig) -> Iterator[Clash]:
    for key, path in {"data.path": config.data.path, **config.eval.paths}.items():
        if path is None or not is_on_hub(path):
            continue
        wanted = hub_path(path)
        if wanted is None:
            yield Clash(
                (key,),
                f"{key}={path} names no files on the hub",
                f"Write {FORM}, where FILES may hold *; a slash in REVISION is %2F.",
            )
        elif not wanted.is_readable:
            yield Clash(
                (key,),
                f"{key}={path} names files that cannot be read: prompts are Parquet or JSON Lines, "
                f"{', '.join(READABLE)}",
                "Name such files. The hub keeps Parquet files of most datasets under the revision "
                "refs%2Fconvert%2Fparquet.",
            )


def _prompts_have_one_source(config: RunConfig) -> Iterator[Clash]:
    name, path = config.environment.name, config.data.path
    if name in MAKE_PROMPTS and path is not None:
        yield Clash(
            ("data.path", "environment.name"),
            f"data.path is not used: environment.name={name} makes its own prompts",
            "Leave data.path out, or set environment.name to function to score the rows of your file.",
        )
    elif name == "function" and path is None:
        yield Clash(
            ("data.path", "environment.name"),
            "environment.name=function has no prompts: a reward function makes none",
            "Set data.path to a file with a `prompt` or `messages` in each row.",
        )
    elif name == "agent" and path is None:
        yield Clash(
            ("data.path", "environment.name"),
            "environment.name=agent has no tasks: an agent makes none",
            "Set data.path to a JSON Lines file; each row is the task of a call of the agent.",
        )
    elif name == "gsm8k" and path is None:
        yield Clash(
            ("data.path", "environment.name"),
            "environment.name=gsm8k has no prompts of its own",
            "Set data.path to a file with `question` and `answer` in each row.",
        )
    if config.data.columns and path is None:
        yield Clash(
            ("data.columns", "data.path"),
            "data.columns is not used: there is no data.path",
            "Set data.path to the file that has these columns, or leave data.columns out.",
        )


def eval_set_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings of evaluation sets that nothing reads."""
    if config.environment.name in MAKE_PROMPTS:
        for key in config.eval.paths:
            yield Clash(
                (key, "environment.name"),
                f"{key} is not used: environment.name={config.environment.name} makes its own prompts",
                f"Leave {key} out: the first prompts of the training source are scored.",
            )
    sets = {f"eval.sets.{name}": each for name, each in config.eval.sets.items()}
    for section, each in {"eval": config.eval, **sets}.items():
        if each.columns and each.path is None:
            yield Clash(
                (f"{section}.columns", f"{section}.path"),
                f"{section}.columns is not used: there is no {section}.path",
                f"Set {section}.path to the file that has these columns, or leave them out.",
            )


def eval_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings of all evaluations that do not go together."""
    if config.eval.sets and config.eval.path is not None:
        yield Clash(
            ("eval.path", "eval.sets"),
            "eval.path is not used: eval.sets names the sets that are scored",
            "Make it a set of its own, as in eval.sets.held_out.path, or leave it out.",
        )
    if config.eval.at_start and not config.eval.interval:
        yield Clash(
            ("eval.at_start", "eval.interval"),
            "eval.at_start does nothing with eval.interval=0: nothing is evaluated",
            "Set eval.interval to the steps between two evaluations.",
        )


def in_each_environment(
    check: Callable[[RunConfig], Iterator[Clash]],
) -> Callable[[RunConfig], Iterator[Clash]]:
    """Return a check of all environments of a run, made of a check of a single one."""

    def checked(config: RunConfig) -> Iterator[Clash]:
        for name, view in environment_views(config).items():
            for clash in check(view):
                yield _in_environment(name, clash) if name else clash

    return checked


def _in_environment(name: str, clash: Clash) -> Clash:
    keys = tuple(text_in(name, key) for key in clash.keys)
    return Clash(keys, text_in(name, clash.message), text_in(name, clash.hint))


def mixture_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what stands beside several environments and is not read, or cannot be one of them."""
    if not config.environments:
        return
    single = {
        "environment": config.environment != EnvironmentConfig(),
        "data": config.data != DataConfig(),
    }
    for key, is_set in single.items():
        if is_set:
            yield Clash(
                (key, "environments"),
                f"{key} is not used: environments names those that the run trains on",
                f"Write it below one of them, as in environments.NAME.{key}, or leave it out.",
            )
    scored = {
        "eval.path": config.eval.path,
        "eval.columns": config.eval.columns,
        "eval.sets": config.eval.sets,
    }
    for key, value in scored.items():
        if value:
            yield Clash(
                (key, "environments"),
                f"{key} is not used: each of environments has an evaluation set of its own",
                "Name the files in environments.NAME.eval.",
            )
    for name, each in config.environments.items():
        if each.environment.name == "demonstrations":
            yield Clash(
                (f"environments.{name}.environment.name",),
                f"environments.{name}.environment.name=demonstrations cannot be mixed: its rows are "
                "trained without an engine, and the others need one",
                "Train on the demonstrations first, in a run of their own, and take its model.",
            )
