"""The Ray actor of the torch backend."""

import torch

from offbeat.actors.trainers.spec import TrainerSpec
from offbeat.actors.trainers.torch_backend.split_step import TorchTrainer
from offbeat.actors.trainers.trainer_actor import TrainerActor
from offbeat.weight_sync.source import ModuleSource


class TorchTrainerActor(TrainerActor):
    """A Hugging Face model on one rank."""

    def __init__(self, spec: TrainerSpec) -> None:
        config = spec.config
        torch.set_num_threads(config.trainer.threads)
        trainer = TorchTrainer(
            spec.model_path,
            trainer=config.trainer,
            model=config.model,
            total_steps=config.steps,
            seed=config.seed,
        )
        source = ModuleSource(trainer.module, int(config.sync.chunk_mb * 2**20))
        super().__init__(spec, trainer, source)
