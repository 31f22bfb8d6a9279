"""Ray actor of the stub trainer, for dry runs. Its process loads torch only for TensorDict."""

from collections.abc import Callable, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.stub import StubTrainer
from offbeat.weight_sync.manifest import plan


class StubSource:
    """Weight source of the stub: the sixteen bytes of its weights."""

    def __init__(self, trainer: StubTrainer) -> None:
        self._trainer = trainer
        self.manifest = plan([("stub.weight", (16,), "uint8")], chunk_bytes=1024)

    def chunks(
        self, room: Callable[[int, int], NDArray[np.uint8]] | None = None
    ) -> Iterator[tuple[NDArray[np.uint8], str]]:
        del room
        packed = np.frombuffer(bytearray.fromhex(self._trainer.weights_digest()), np.uint8)
        yield packed, xxhash.xxh3_128_hexdigest(packed.data)


class StubTrainerActor(TrainerActor):
    """Async actor of one stub rank, which represents all ranks of the recipe."""

    def __init__(self, spec: TrainerSpec) -> None:
        config = spec.config
        trainer = StubTrainer(
            config.stub,
            optimizer=config.trainer.optimizer,
            groups_per_step=config.groups_per_step,
        )
        super().__init__(spec, lambda _: (trainer, StubSource(trainer)))
