"""A trainer rank with a fault switch inside its model; Ray's workers import it by this module's name."""

import os
import signal

from torch import nn

from offbeat.actors.trainer_actor import TorchTrainerActor
from offbeat.messages.fences import Fence
from offbeat.trainers.torch import TorchTrainer


class FaultyTrainerActor(TorchTrainerActor):
    """A torch rank whose forward pass fails, or ends its process, from a given moment on."""

    def fail_in_forward(self, fence: Fence) -> None:
        """Make every forward pass of this process raise in the model's first layer.

        The other ranks then wait for its part of the next layer's weights.
        """
        self._admit(fence)

        def fail(*_: object) -> None:
            raise IndexError("planted in the first layer")

        self._first_layer.register_forward_pre_hook(fail)

    def die_in_forward(self, fence: Fence, passes: int) -> None:
        """Kill this process in the forward pass that follows ``passes`` whole ones."""
        self._admit(fence)
        left = [passes]

        def die(*_: object) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        self._first_layer.register_forward_pre_hook(die)

    @property
    def _first_layer(self) -> nn.Module:
        """Return the first layer of what this rank holds: of the decoder, or of a vision tower."""
        assert isinstance(self._split, TorchTrainer)
        modules = self._split.module.modules()
        return next(each[0] for each in modules if isinstance(each, nn.ModuleList))
