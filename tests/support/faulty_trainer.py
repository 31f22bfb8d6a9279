"""A trainer rank with a fault switch inside its model; Ray's workers import it by this module's name."""

from offbeat.actors.torch_trainer_actor import TorchTrainerActor
from offbeat.messages.fences import Fence
from offbeat.trainers.torch import TorchTrainer


class FaultyTrainerActor(TorchTrainerActor):
    """A torch rank whose forward pass fails from a given moment on."""

    def fail_in_forward(self, fence: Fence) -> None:
        """Make every forward pass of this process raise in the model's first layer.

        The other ranks then wait for its part of the next layer's weights.
        """
        self._admit(fence)
        assert isinstance(self._split, TorchTrainer)

        def fail(*_: object) -> None:
            raise IndexError("planted in the first layer")

        layer = next(self._split.module.get_submodule("model.layers").children())
        layer.register_forward_pre_hook(fail)
