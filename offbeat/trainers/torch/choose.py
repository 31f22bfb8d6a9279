"""Makes the torch trainer of a recipe from its parts, and the source of its weights."""

from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.assembly import (
    in_steps,
    rank_options,
    shards_of,
    source_of,
)
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.teacher import check_tokenizers
from offbeat.trainers.torch.parts import TorchParts
from offbeat.trainers.torch.split_step import TorchTrainer
from offbeat.trainers.trainer_part import make_source, replace_parts
from offbeat.weight_sync.transport import WeightSource


def make_torch_rank(spec: TrainerSpec, peers: Peers) -> tuple[TorchTrainer, WeightSource]:
    """Create the trainer of a rank, and the source of its weights."""
    if teacher := spec.config.algorithm.loss.teacher_path:
        check_tokenizers(teacher, spec.config.model.path)  # now, not before the first step
    trainer = torch_trainer_of(spec, peers)
    if source := make_source(spec, trainer):
        return trainer, source
    metas = list(trainer.model_state.metas())
    if shards := shards_of(spec, metas, trainer.held_regions, peers):
        return trainer, shards
    return trainer, source_of(spec, metas, trainer.named_weights)


def torch_trainer_of(spec: TrainerSpec, peers: Peers) -> TorchTrainer:
    """Build the trainer of one rank, of which plug-ins may replace parts."""
    config = of_kind(TorchTrainerConfig, spec.config.trainer)
    return TorchTrainer(
        spec.config.model.path,
        trainer=in_steps(spec, config),
        max_model_len=spec.config.generator.max_model_len,
        parts=replace_parts(spec.config, peers.rank, TorchParts()),
        **rank_options(spec, peers),
    )
