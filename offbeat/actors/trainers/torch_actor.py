"""The Ray actor of the torch backend."""

import torch

from offbeat.actors.trainers.gathered_source import GatheredSource
from offbeat.actors.trainers.peers import Peers
from offbeat.actors.trainers.spec import TrainerSpec
from offbeat.actors.trainers.torch_backend.split_step import TorchTrainer
from offbeat.actors.trainers.trainer_actor import TrainerActor
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.source import ModuleSource
from offbeat.weight_sync.transport import Source


class TorchTrainerActor(TrainerActor):
    """A Hugging Face model on one rank, or cut over several."""

    def __init__(self, spec: TrainerSpec) -> None:
        torch.set_num_threads(spec.config.trainer.threads)
        super().__init__(spec, lambda peers: make(spec, peers))


def make(spec: TrainerSpec, peers: Peers) -> tuple[TorchTrainer, Source]:
    """The trainer of a rank, and what sends its weights."""
    config = spec.config
    trainer = TorchTrainer(
        spec.model_path,
        trainer=config.trainer,
        model=config.model,
        total_steps=config.steps,
        seed=config.seed,
        peers=peers,
    )
    policy = WirePolicy(config.sync.wire_dtype, config.sync.keep_float32)
    chunk_bytes = int(config.sync.chunk_mb * 2**20)
    if peers.size == 1:
        return trainer, ModuleSource(trainer.module, chunk_bytes, policy)
    metas = trainer.weights.metas()
    return trainer, GatheredSource(metas, trainer.named_weights, chunk_bytes, policy)
