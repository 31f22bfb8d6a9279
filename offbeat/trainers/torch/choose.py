"""Chooses the torch trainer for a recipe, whole model or adapters, and the source of its weights."""

from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.assembly import (
    adapter_source_of,
    in_steps,
    rank_options,
    shards_of,
    source_of,
)
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.teacher import check_tokenizers
from offbeat.trainers.torch.split_step import TorchTrainer
from offbeat.trainers.trainer_part import choose_trainer
from offbeat.weight_sync.transport import WeightSource


def make_torch_rank(spec: TrainerSpec, peers: Peers) -> tuple[TorchTrainer, WeightSource]:
    """Create the trainer of a rank, and the source of its weights."""
    config = of_kind(TorchTrainerConfig, spec.config.trainer)
    if teacher := spec.config.algorithm.loss.teacher_path:
        check_tokenizers(teacher, spec.config.model.path)  # now, not before the first step
    trainer = torch_trainer_of(spec, peers)
    if config.lora is None:
        metas = list(trainer.weights.metas())
        if shards := shards_of(spec, metas, trainer.held_regions, peers):
            return trainer, shards
        return trainer, source_of(spec, metas, trainer.named_weights)
    from offbeat.trainers.torch.lora_trainer import LoraTrainer  # noqa: PLC0415 -- an extra

    assert isinstance(trainer, LoraTrainer)  # noqa: S101 -- chosen by the same setting
    if spec.config.sync.adapter == "merged":
        whole = trainer.merged
        return trainer, source_of(spec, whole.metas(), whole.named)
    return trainer, adapter_source_of(spec, trainer.weights, trainer.adapter)


def torch_trainer_of(spec: TrainerSpec, peers: Peers) -> TorchTrainer:
    """Build the trainer of one rank.

    A ``LoraTrainer`` if the recipe has ``trainer.lora``, or the class that a part of the trainer chooses.
    """
    config, kind = of_kind(TorchTrainerConfig, spec.config.trainer), TorchTrainer
    if config.lora is not None:
        from offbeat.trainers.torch.lora_trainer import LoraTrainer  # noqa: PLC0415 -- an extra

        kind = LoraTrainer
    kind = choose_trainer(spec.config, peers.rank, kind)
    return kind(
        spec.config.model.path,
        trainer=in_steps(spec, config),
        max_model_len=spec.config.generator.max_model_len,
        **rank_options(spec, peers),
    )
