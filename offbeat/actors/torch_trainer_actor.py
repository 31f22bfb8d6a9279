"""Ray actor of a rank of the torch backend."""

from functools import partial

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.config.base import of_kind
from offbeat.config.limits import rank_resources
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.telemetry.process import pause_collections
from offbeat.trainers.spec import TrainerSpec


class TorchTrainerActor(TrainerActor):
    """One rank of a Hugging Face model, whole or sharded over several ranks."""

    def __init__(self, spec: TrainerSpec) -> None:
        with pause_collections():
            import torch

            from offbeat.trainers.torch.choose import make_torch_rank

        trainer = of_kind(TorchTrainerConfig, spec.config.trainer)
        torch.set_num_threads(rank_resources(trainer, spec.rank, spec.ranks).threads)
        super().__init__(spec, partial(make_torch_rank, spec))
