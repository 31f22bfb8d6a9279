"""Choice of a rank's trainer of the megatron backend: of the whole model, or of one side of it."""

from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.grid.layout import Side
from offbeat.trainers.megatron.boxed_trainer import BoxedTrainer
from offbeat.trainers.megatron.split_step import MegatronTrainer
from offbeat.trainers.megatron_grid.encoder import MegatronEncoderTrainer
from offbeat.trainers.megatron_grid.language import MegatronLanguageTrainer
from offbeat.trainers.megatron_grid.layout import side_grid
from offbeat.trainers.ranks.assembly import trainer_of
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec


def megatron_trainer_of(
    spec: TrainerSpec, config: MegatronTrainerConfig, peers: Peers
) -> BoxedTrainer:
    """Build the trainer of one rank: that of one side with ``trainer.encoder``."""
    if config.encoder is None:
        return trainer_of(MegatronTrainer, spec, config, peers)
    if side_grid(config).side_of(peers.rank) is Side.LANGUAGE:
        return trainer_of(MegatronLanguageTrainer, spec, config, peers)
    return trainer_of(MegatronEncoderTrainer, spec, config, peers)
