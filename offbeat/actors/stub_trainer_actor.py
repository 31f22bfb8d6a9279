"""Ray actor of the stub trainer, for dry runs. Its process loads torch only for TensorDict."""

from functools import partial

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.fakes.trainer import make_stub_rank
from offbeat.trainers.spec import TrainerSpec


class StubTrainerActor(TrainerActor):
    """One stub rank, which represents all ranks of the recipe."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec, partial(make_stub_rank, spec))
