"""Ray actor of a rank of a backend that a plug-in brings."""

from contextlib import ExitStack
from functools import partial

from offbeat.actors.trainer_actor import TrainerActor
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.trainer_plugin import find_trainer


class PluginTrainerActor(TrainerActor):
    """One rank of a model, trained by a plug-in."""

    def __init__(self, spec: TrainerSpec) -> None:
        plugin = find_trainer(spec.config.trainer.backend)
        if plugin is None:
            raise TypeError(f"trainer.backend={spec.config.trainer.backend} is no plug-in")
        self._for_process = ExitStack()  # active for the lifetime of this process
        plugin.prepare_process(spec.config, self._for_process)
        super().__init__(spec, partial(plugin.make_rank, spec))
