"""Settings of several environments that cannot work, and checks of one that hold for each of several."""

from collections.abc import Callable, Iterator

from offbeat.config.clash import Clash
from offbeat.config.mixture import environment_views, text_in
from offbeat.config.run import RunConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig


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
