"""Ray actor of a rank of the megatron backend."""

from contextlib import ExitStack
from functools import partial

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.spec import TrainerSpec


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
        # Imports megatron-core, which must find the stand-ins
        from offbeat.trainers.megatron_grid.language import make_megatron_rank

        super().__init__(spec, partial(make_megatron_rank, spec))
