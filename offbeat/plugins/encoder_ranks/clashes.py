"""Finds settings that do not work with encoder ranks (``trainer.encoder``).

Depends on the option ``images``.
"""

import math
from collections.abc import Iterator

from offbeat.config.limits import find_encoder
from offbeat.config.mixture import has_media
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen


def encoder_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that cannot work with encoder ranks, not even in a dry run.

    Whether the model has a tower is checked when the trainer starts, because only the trainer reads
    the model's config.
    """
    trainer, encoder = config.trainer, find_encoder(config.trainer)
    if encoder is None or trainer.backend == "stub":
        return
    lanes, encoders = trainer.data_parallel, encoder.data_parallel
    if lanes % encoders:
        multiple = -(-lanes // encoders) * encoders
        yield Clash(
            ("trainer.data_parallel", "trainer.encoder.data_parallel"),
            f"trainer.data_parallel={lanes} is not divisible by trainer.encoder.data_parallel={encoders}: "
            "every encoder rank encodes for as many language ranks",
            f"Set trainer.encoder.data_parallel to {math.gcd(lanes, encoders)} or another divisor of {lanes}, "
            f"trainer.data_parallel to {multiple}, or, for more ranks that encode the same pictures, "
            "trainer.encoder.tensor_parallel.",
        )
    if not has_media(config):
        yield Clash(
            ("trainer.encoder", "environment.images"),
            "trainer.encoder makes ranks that encode pictures, but environment.images is not set: no "
            "prompt has any",
            "Leave trainer.encoder out, or set environment.images.",
        )
    if model_is_frozen(config):
        yield Clash(
            ("trainer.encoder", "trainer.lora"),
            "trainer.encoder cannot be combined with trainer.lora, whose adapters are on modules of both sides",
            "Leave one of them out.",
        )
    if config.algorithm.loss.teacher_path is not None:
        yield Clash(
            ("trainer.encoder", "algorithm.loss"),
            "trainer.encoder cannot be combined with a teacher: no encoder rank has the "
            "teacher's tower",
            "Leave trainer.encoder out.",
        )


def encoder_device_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield GPUs of encoder ranks if they contradict the language ranks' device."""
    trainer, encoder = config.trainer, find_encoder(config.trainer)
    if encoder is None or encoder.gpus is None or trainer.backend == "stub":
        return
    if (encoder.gpus > 0) != (trainer.gpus > 0):
        yield Clash(
            ("trainer.encoder.gpus", "trainer.gpus"),
            f"trainer.encoder.gpus={encoder.gpus:g} with trainer.gpus={trainer.gpus:g}: all ranks are "
            f"on trainer.device={trainer.device}",
            "Leave trainer.encoder.gpus out.",
        )
