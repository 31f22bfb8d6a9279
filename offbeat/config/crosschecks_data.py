"""Sources of prompts that cannot work."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.hub_path import FORM, READABLE, hub_path, is_on_hub
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import MAKE_PROMPTS


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
