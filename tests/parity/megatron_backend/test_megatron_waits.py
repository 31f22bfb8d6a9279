"""Groups of a layout give up when the world does: a rank that hangs is found before the step's deadline."""

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from world import COLLECTIVE_S, World


def test_groups_of_a_layout_wait_as_long_as_the_world(world: World) -> None:
    assert world.run(2, "megatron_wait_jobs:waits") == [{COLLECTIVE_S}] * 2
