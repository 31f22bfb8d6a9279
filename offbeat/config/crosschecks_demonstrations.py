"""Combinations of settings that cannot work where groups are rows of a file."""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig

_UNREAD: Final = {
    "environment": (
        "target",
        "command",
        "options",
        "reward_deadline_s",
        "reward_start_s",
        "reward_workers",
        "reward_memory_mib",
        "variables",
        "max_turns",
    ),
    "rollout": ("on_failed_sample", "sample_retries", "max_sample_tokens", "max_branches"),
}
"""Keys that nothing reads where no model is called and nothing is scored."""


def demonstration_clashes(config: RunConfig) -> Iterator[Clash]:
    """Demonstrations come without a generator, and what reads a generator comes without them."""
    recorded = config.environment.name == "demonstrations"
    generator = config.generator
    if recorded and generator.has_engines:
        yield Clash(
            ("environment.name", "generator.backend"),
            f"environment.name=demonstrations has no work for generator.backend={generator.backend}: "
            "its samples are rows of a file",
            "Set generator.backend to none.",
        )
    if not (generator.has_engines or recorded):
        yield Clash(
            ("generator.backend", "environment.name"),
            f"generator.backend=none draws no samples, and environment.name={config.environment.name} "
            "needs them",
            "Set environment.name to demonstrations, or generator.backend to embedded or vllm.",
        )
    if recorded:
        yield from _rows_are_trained_as_they_are(config)


def _rows_are_trained_as_they_are(config: RunConfig) -> Iterator[Clash]:
    if config.data.path is None:
        yield Clash(
            ("data.path", "environment.name"),
            "environment.name=demonstrations has no rows of its own",
            "Set data.path to a JSON Lines file with `prompt` and `completion`, or `messages`, in "
            "each row.",
        )
    for section, keys in _UNREAD.items():
        set_here = getattr(config, section).model_dump(exclude_defaults=True)
        for key in (each for each in keys if each in set_here):
            yield Clash(
                (f"{section}.{key}", "environment.name"),
                f"{section}.{key} is not used with environment.name=demonstrations: no model is called "
                "and nothing is scored",
                f"Leave {section}.{key} out.",
            )
    loss = config.algorithm.loss.name
    if loss != "sft":
        yield Clash(
            ("algorithm.loss.name", "environment.name"),
            f"algorithm.loss.name={loss} learns nothing with environment.name=demonstrations: rows "
            "have neither rewards nor logprobs of an engine",
            "Set algorithm.loss.name to sft.",
        )
    if config.samples_per_group != 1:
        yield Clash(
            ("samples_per_group", "environment.name"),
            f"samples_per_group={config.samples_per_group} with environment.name=demonstrations: a row "
            "holds one sample",
            "Set samples_per_group to 1; groups_per_step is the number of rows in a step.",
        )
    if config.sampler.name != "in_order":
        yield Clash(
            ("sampler.name", "environment.name"),
            f"sampler.name={config.sampler.name} decides by the age of samples, and rows of "
            "environment.name=demonstrations have none",
            "Set sampler.name to in_order, and sampler.max_staleness to the steps to read ahead.",
        )
    if config.eval.interval:
        yield Clash(
            ("eval.interval", "generator.backend"),
            f"eval.interval={config.eval.interval} needs an engine to sample the held-out prompts, and "
            f"generator.backend={config.generator.backend} has none",
            "Set eval.interval to 0; evaluate the exported model in a run that has engines.",
        )
