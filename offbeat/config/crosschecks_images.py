"""Combinations of settings that cannot work with pictures in prompts."""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.limits import encoder_of
from offbeat.config.mixture import has_media
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.doors import find_media
from offbeat.messages.no_media import NoMedia

READ_PICTURES: Final = ("function", "custom", "digits", "stub")
"""Environments whose prompts may have pictures."""


def image_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what reads no pictures where prompts have some, and pictures without their limits."""
    name = config.environment.name
    if config.environment.images is None:
        if name == "digits":
            yield Clash(
                ("environment.images", "environment.name"),
                "environment.name=digits draws a picture for each prompt, and environment.images is "
                "not set",
                "Write `images: {max_mib: 0.02}` under environment.",
            )
        return
    if isinstance(find_media(), NoMedia):
        yield Clash(
            ("environment.images",),
            "no plug-in that reads media is installed",
            "Reinstall offbeat, or leave out environment.images.",
        )
    if name not in READ_PICTURES:
        yield Clash(
            ("environment.images", "environment.name"),
            f"environment.images is not used: prompts of environment.name={name} have no pictures",
            f"Leave it out, or set environment.name to one of {', '.join(READ_PICTURES)}.",
        )


def image_layout_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield ranks that divide a vision tower together with the language model."""
    trainer = config.trainer
    if not isinstance(trainer, TorchTrainerConfig) or trainer.tensor_parallel == 1:
        return
    if encoder_of(trainer) is None and has_media(config):
        fixes = ["Set trainer.tensor_parallel to 1"]
        if not model_is_frozen(config) and config.algorithm.loss.teacher_path is None:
            fixes.append(
                "or give the tower ranks of its own, beside which the language model may be divided: "
                "trainer.encoder.data_parallel=1"
            )
        yield Clash(
            ("trainer.tensor_parallel", "environment.images"),
            f"trainer.tensor_parallel={trainer.tensor_parallel} of trainer.backend=torch does not go "
            "with environment.images: a vision tower is divided on ranks of its own alone",
            f"{', '.join(fixes)}.",
        )
