"""Finds settings that contradict the torch trainer's tensor ranks (``trainer.tensor_parallel``)."""

from collections.abc import Iterator

from offbeat.config.limits import find_encoder, find_moe
from offbeat.config.mixture import has_media
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.trainer_parts import model_is_frozen


def tensor_clashes(config: RunConfig, trainer: TorchTrainerConfig) -> Iterator[Clash]:
    """Yield settings that cannot work if several ranks share each matrix."""
    ranks = f"trainer.tensor_parallel={trainer.tensor_parallel} of trainer.backend=torch"
    if find_moe(config) is not None:
        yield Clash(
            ("trainer.tensor_parallel", "trainer.moe"),
            f"{ranks} cannot be combined with trainer.moe: experts are not divided",
            "Set trainer.tensor_parallel to 1, or leave trainer.moe out.",
        )
    if find_encoder(trainer) is None and has_media(config):
        fixes = ["Set trainer.tensor_parallel to 1"]
        if not model_is_frozen(config) and config.algorithm.loss.teacher_path is None:
            fixes.append(
                "or give the tower separate ranks, so that the language model can be divided: "
                "trainer.encoder.data_parallel=1"
            )
        yield Clash(
            ("trainer.tensor_parallel", "environment.images"),
            f"{ranks} cannot be combined with environment.images: a vision tower can be divided "
            "only on separate ranks",
            f"{', '.join(fixes)}.",
        )
