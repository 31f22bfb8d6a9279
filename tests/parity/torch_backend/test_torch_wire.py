"""What trainer ranks exchange is data: nothing that arrives from another rank is unpickled."""

from collections.abc import Callable
from pathlib import Path

import pytest
from parity_cases import Cut, Step
from world import World


def test_ranks_train_save_and_restore_without_a_pickle(
    world: World, models: Callable[[str], Path], step: Step, tmp_path: Path
) -> None:
    given = {"path": models("qwen3"), "step": step, "root": tmp_path}
    assert world.run(2, "wire_jobs:trained_and_saved", **given) == [([], 1)] * 2


def test_an_object_collective_would_have_been_seen(world: World) -> None:
    for seen in world.run(2, "wire_jobs:object_collective"):
        assert {"all_gather_object"} == set(seen)


def test_a_group_that_is_made_later_still_finds_the_store(world: World) -> None:
    assert world.run(2, "wire_jobs:groups_made_later") == [[1], [1]]


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [("qwen3", 2, "bfloat16"), ("moe", 2, "float32"), ("qwen3", 4, "float32")],
)
def test_sharded_receivers_get_what_a_broadcast_sends_from_the_shards_alone(
    world: World, models: Callable[[str], Path], name: str, ranks: int, dtype: str
) -> None:
    answers = world.run(ranks, "torch_jobs:sent", path=models(name), cut=Cut(dtype=dtype))
    assert [same for same, _ in answers] == [True] * ranks
    assert all(nbytes for _, nbytes in answers[:2])
