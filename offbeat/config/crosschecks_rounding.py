"""Finds settings beside which bfloat16 weights cannot be rounded at random."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import encoder_of, trainer_ranks
from offbeat.config.run import RunConfig


def rounding_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what rounding at random does not go with."""
    trainer = config.trainer
    if trainer.backend == "stub" or trainer.optimizer.rounding == "nearest":
        return
    key, ranks = "trainer.optimizer.rounding", trainer_ranks(config)
    has_encoder = encoder_of(trainer) is not None
    one_rank = "train on one rank, with trainer.data_parallel and trainer.tensor_parallel of 1"
    if has_encoder:
        one_rank = "train on one rank, without trainer.encoder"
    if trainer.backend != "torch":
        yield Clash(
            (key, "trainer.backend"),
            f"{key}=stochastic is of trainer.backend=torch; {trainer.backend} rounds weights by itself",
            f"Set {key} to nearest, or trainer.backend to torch.",
        )
    if ranks > 1:
        yield Clash(
            (key, "trainer.encoder" if has_encoder else "trainer.data_parallel"),
            f"{key}=stochastic does not go with {ranks} trainer ranks: each gathers float32 weights and "
            "rounds them to the nearest",
            f"Set {key} to nearest, also of a run that is resumed, or {one_rank}.",
        )
    if config.model.dtype != "bfloat16":
        yield Clash(
            (key, "model.dtype"),
            f"{key}=stochastic does nothing with model.dtype={config.model.dtype}: its weights are the "
            "optimizer's own",
            f"Set model.dtype to bfloat16, or {key} to nearest.",
        )
