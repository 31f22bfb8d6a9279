"""Sizes of the fleet, of engines and of trainer ranks, that cannot work."""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.limits import encoder_ranks, trainer_ranks
from offbeat.config.run import RunConfig

MOST_TRAINER_RANKS: Final = 1 << 17
"""More GPUs than any machine for training has; what is computed for each rank still takes seconds."""


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


def rank_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield more trainer ranks than there can be: a slip of the pen, which would be computed for long."""
    ranks, encoders = trainer_ranks(config), encoder_ranks(config.trainer)
    if ranks > MOST_TRAINER_RANKS:
        of_encoders = f", {encoders} of them of trainer.encoder," if encoders else ""
        yield Clash(
            ("trainer.data_parallel", *(["trainer.encoder"] if encoders else [])),
            f"the sizes of trainer make {ranks} trainer ranks{of_encoders} and at most "
            f"{MOST_TRAINER_RANKS} are possible",
            "Lower trainer.data_parallel or another size of trainer"
            f"{' or trainer.encoder' if encoders else ''}.",
        )
