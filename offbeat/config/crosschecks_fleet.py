"""Sizes of the fleet, of engines and of trainer ranks, that cannot work."""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.limits import (
    encoder_ranks,
    trainer_device,
    trainer_ranks,
    trainer_resources,
)
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


def rank_gpu_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield fractions of GPUs for several trainer ranks: Ray may put two ranks on one GPU, which NCCL refuses."""
    resources = trainer_resources(config) if trainer_device(config.trainer) != "cpu" else []
    least = min((each.gpus for each in resources), default=1.0)
    if len(resources) > 1 and 0 < least < 1:
        key = "trainer.gpus" if config.trainer.gpus == least else "trainer.encoder.gpus"
        yield Clash(
            (key, "trainer.device"),
            f"{key}={least:g} may put two of the {len(resources)} trainer ranks on one GPU, and NCCL connects "
            "ranks on GPUs of their own only",
            f"Set {key} to 1, or use one trainer rank.",
        )
