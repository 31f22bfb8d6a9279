"""Ray actor of a rank of the megatron backend."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.transport import WeightSource

if TYPE_CHECKING:
    from offbeat.trainers.megatron.boxed_trainer import BoxedTrainer


class MegatronTrainerActor(TrainerActor):
    """One rank of a model under tensor, pipeline, data and expert parallelism."""

    def __init__(self, spec: TrainerSpec) -> None:
        import torch

        from offbeat.trainers.megatron.cpu_shim import cpu_stands_in

        trainer = of_kind(MegatronTrainerConfig, spec.config.trainer)
        torch.set_num_threads(trainer.threads)
        self._stands_in = ExitStack()  # active for the lifetime of this process
        if trainer.device == "cpu":
            self._stands_in.enter_context(cpu_stands_in(trainer.device))
        super().__init__(spec, lambda peers: make(spec, peers))


def make(spec: TrainerSpec, peers: Peers) -> tuple["BoxedTrainer", WeightSource]:
    """Create the trainer of a rank, and the source of its weights."""
    from offbeat.trainers.megatron_grid.language import megatron_trainer_of
    from offbeat.trainers.ranks.assembly import shards_of, source_of

    config = of_kind(MegatronTrainerConfig, spec.config.trainer)
    trainer = megatron_trainer_of(spec, config, peers)
    if shards := shards_of(spec, trainer.metas(), trainer.held_regions, peers):
        return trainer, shards
    return trainer, source_of(spec, trainer.metas(), trainer.named_weights)
