"""Combinations of settings of the engines that cannot work."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig


def fleet_clashes(config: RunConfig) -> Iterator[Clash]:
    """More engines are required than the run has."""
    engines, fewest = config.generator.engines, config.generator.min_engines
    if fewest > engines:
        yield Clash(
            ("generator.min_engines", "generator.engines"),
            f"generator.min_engines={fewest} is more than generator.engines={engines}: the run has "
            "fewer engines than it may go on with",
            f"Set generator.min_engines to {engines} or less, or generator.engines to {fewest} or "
            "more.",
        )
