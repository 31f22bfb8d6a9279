"""Choice of the torch trainer that a recipe asks for: of the whole model, or of adapters beside it."""

from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.assembly import in_steps, rank_options
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.split_step import TorchTrainer


def torch_trainer_of(spec: TrainerSpec, peers: Peers) -> TorchTrainer:
    """Build the trainer of one rank.

    A ``LoraTrainer`` if the recipe has ``trainer.lora``, that of one side with ``trainer.encoder``.
    """
    config, kind = of_kind(TorchTrainerConfig, spec.config.trainer), TorchTrainer
    if config.lora is not None:
        from offbeat.trainers.torch.lora_trainer import LoraTrainer  # noqa: PLC0415 -- an extra

        kind = LoraTrainer
    if config.encoder is not None:
        from offbeat.trainers.grid.choose import grid_trainer_kind  # noqa: PLC0415 -- imports this room

        kind = grid_trainer_kind(config, peers.rank)
    return kind(
        spec.config.model.path,
        trainer=in_steps(spec, config),
        max_model_len=spec.config.generator.max_model_len,
        **rank_options(spec, peers),
    )
