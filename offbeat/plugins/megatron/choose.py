"""Chooses the megatron trainer of a rank, and the source of its weights."""

from collections.abc import Callable

from offbeat.config.base import of_kind
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.plugins.megatron.split_step import MegatronTrainer
from offbeat.trainers.model_trainer import ModelTrainer
from offbeat.trainers.ranks.assembly import in_steps, rank_options, shards_of, source_of
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.trainer_part import choose_trainer
from offbeat.weight_sync.transport import WeightSource


def make_megatron_rank(spec: TrainerSpec, peers: Peers) -> tuple[ModelTrainer, WeightSource]:
    """Create the trainer of a rank, and the source of its weights."""
    trainer = make_megatron_trainer(spec, peers)
    metas = list(trainer.model_state.metas())
    if shards := shards_of(spec, metas, trainer.held_regions, peers):
        return trainer, shards
    return trainer, source_of(spec, metas, trainer.named_weights)


def make_megatron_trainer(spec: TrainerSpec, peers: Peers) -> ModelTrainer:
    """Create the trainer of a rank: of one side if the vision tower has separate ranks."""
    config = of_kind(MegatronTrainerConfig, spec.config.trainer)
    kind: Callable[..., ModelTrainer] = choose_trainer(spec.config, peers.rank, MegatronTrainer)
    return kind(spec.config.model.path, trainer=in_steps(spec, config), **rank_options(spec, peers))
