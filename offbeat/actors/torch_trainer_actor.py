"""Ray actor of a rank of the torch backend."""

from functools import partial

import torch

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.assembly import adapter_source_of, source_of, trainer_of
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.teacher import check_tokenizers
from offbeat.trainers.torch.split_step import TorchTrainer
from offbeat.weight_sync.transport import Source


class TorchTrainerActor(TrainerActor):
    """One rank of a Hugging Face model, whole or sharded over several ranks."""

    def __init__(self, spec: TrainerSpec) -> None:
        torch.set_num_threads(of_kind(TorchTrainerConfig, spec.config.trainer).threads)
        super().__init__(spec, lambda peers: make(spec, peers))


def make(spec: TrainerSpec, peers: Peers) -> tuple[TorchTrainer, Source]:
    """Create the trainer of a rank, and the source of its weights."""
    config = of_kind(TorchTrainerConfig, spec.config.trainer)
    if teacher := spec.config.algorithm.loss.teacher_path:
        check_tokenizers(teacher, spec.config.model.path)  # now, not before the first step
    length = spec.config.generator.max_model_len
    if config.lora is None:
        trainer = trainer_of(partial(TorchTrainer, max_model_len=length), spec, config, peers)
        return trainer, source_of(spec, trainer.weights.metas(), trainer.named_weights)
    from offbeat.trainers.torch.lora_trainer import LoraTrainer  # noqa: PLC0415 -- for this recipe

    adapted = trainer_of(partial(LoraTrainer, max_model_len=length), spec, config, peers)
    if spec.config.sync.adapter == "merged":
        whole = adapted.merged
        return adapted, source_of(spec, whole.metas(), whole.named)
    return adapted, adapter_source_of(spec, adapted.weights, adapted.adapter)
