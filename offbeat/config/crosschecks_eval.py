"""Combinations of settings of evaluations that cannot work."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import MAKE_PROMPTS


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
