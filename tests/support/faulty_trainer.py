"""A trainer rank with a fault switch inside its model; Ray's workers import it by this module's name."""

from offbeat.actors.trainers.torch_actor import TorchTrainerActor
from offbeat.actors.trainers.torch_backend import TorchTrainer
from offbeat.messages.fences import Fence


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
