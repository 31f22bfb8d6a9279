"""Ray actor of a rank of the torch backend."""

from typing import TYPE_CHECKING

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.config.base import of_kind
from offbeat.config.limits import rank_resources
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.teacher import check_tokenizers
from offbeat.weight_sync.transport import WeightSource

if TYPE_CHECKING:
    from offbeat.trainers.torch.split_step import TorchTrainer


class TorchTrainerActor(TrainerActor):
    """One rank of a Hugging Face model, whole or sharded over several ranks."""

    def __init__(self, spec: TrainerSpec) -> None:
        import torch

        trainer = of_kind(TorchTrainerConfig, spec.config.trainer)
        torch.set_num_threads(rank_resources(trainer, spec.rank, spec.ranks).threads)
        super().__init__(spec, lambda peers: make(spec, peers))


def make(spec: TrainerSpec, peers: Peers) -> tuple["TorchTrainer", WeightSource]:
    """Create the trainer of a rank, and the source of its weights."""
    from offbeat.trainers.ranks.assembly import adapter_source_of, shards_of, source_of
    from offbeat.trainers.torch.choose import torch_trainer_of

    config = of_kind(TorchTrainerConfig, spec.config.trainer)
    if teacher := spec.config.algorithm.loss.teacher_path:
        check_tokenizers(teacher, spec.config.model.path)  # now, not before the first step
    trainer = torch_trainer_of(spec, peers)
    if config.lora is None:
        metas = list(trainer.weights.metas())
        if shards := shards_of(spec, metas, trainer.held_regions, peers):
            return trainer, shards
        return trainer, source_of(spec, metas, trainer.named_weights)
    from offbeat.trainers.torch.lora_trainer import LoraTrainer

    assert isinstance(trainer, LoraTrainer)  # noqa: S101 -- chosen by the same setting
    if spec.config.sync.adapter == "merged":
        whole = trainer.merged
        return trainer, source_of(spec, whole.metas(), whole.named)
    return trainer, adapter_source_of(spec, trainer.weights, trainer.adapter)
