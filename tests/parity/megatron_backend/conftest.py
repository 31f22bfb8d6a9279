"""The world of ranks as megatron's, and the torch trainer's step in its terms."""

from collections.abc import Callable

import pytest
from megatron_cases import Told, told
from megatron_world import MegatronWorld
from parity_cases import Outcome
from world import World

from offbeat.config.loss_spec import LossSpec


@pytest.fixture(scope="session")
def megatron_world(world: World) -> MegatronWorld:
    return MegatronWorld(world)


@pytest.fixture(scope="session")
def torch_step(want: Callable[..., Outcome]) -> Callable[..., Told]:
    """What the torch trainer makes of a step on one rank: gradients divided, experts apart."""

    def of(loss: LossSpec, model: str = "qwen3", groups: int | None = None) -> Told:
        return told(want(loss, model, groups=groups), loss)

    return of
