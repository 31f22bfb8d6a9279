"""Checkpoints that all ranks write: what fails on one fails on all, and leaves nothing behind."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from parity_cases import Cut
from world import World

Models = Callable[[str], Path]
FIRST, SECOND = "__0_0.distcp", "__1_0.distcp"


@pytest.fixture
def store(world: World, models: Models, tmp_path: Path) -> "Store":
    return Store(world, models("qwen3"), tmp_path / "checkpoints")


class Store:
    """A directory of checkpoints, in the hands of worlds of several sizes."""

    def __init__(self, world: World, path: Path, root: Path) -> None:
        self._world, self.root = world, root
        self._given: dict[str, Any] = {"path": path, "cut": Cut(dtype="float32"), "root": root}

    def save(self, version: int, ranks: int = 2, **fault: Any) -> list[tuple[str, str]]:
        job = "checkpoint_jobs:saved"
        return self._world.run(ranks, job, version=version, **fault, **self._given)

    def restore(self, ranks: int, at_most: int = 99, **given: Any) -> list[tuple[int, str, str]]:
        job = "checkpoint_jobs:restored"
        return self._world.run(ranks, job, at_most=at_most, **given, **self._given)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


OK = [("", "")] * 2


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize(
    ("fault", "text"), [("full", "No space left on device"), ("in the way", "Is a directory")]
)
def test_a_rank_whose_disk_fails_fails_the_checkpoint_on_all_and_leaves_nothing(
    store: Store, fault: str, text: str, on: int
) -> None:
    assert store.save(10) == OK
    raised = store.save(20, fault=fault, on=on)
    kinds = [kind for kind, _ in raised]
    assert kinds == (["CheckpointFailed"] * 2 if on else ["CheckpointFailed", "PeerFailed"])
    assert raised[on][1].startswith(f"trainer rank {on} failed at its checkpoint of version 20: ")
    assert text in raised[0][1] and text in raised[on][1]
    assert store.names == ["LATEST", "state_10"]
    assert {version for version, *_ in store.restore(2)} == {10}
    assert store.save(20) == OK
    assert store.names == ["LATEST", "state_10", "state_20"]


def test_a_checkpoint_that_the_first_rank_cannot_name_is_none_for_anybody(store: Store) -> None:
    assert store.save(10) == OK
    raised = store.save(20, fault="at the end", on=0)
    assert [kind for kind, _ in raised] == ["CheckpointFailed", "PeerFailed"]
    assert store.names == ["LATEST", "state_10"]


def test_each_rank_writes_a_share_and_together_they_write_what_one_does(store: Store) -> None:
    store.save(1, ranks=1)
    store.save(2, ranks=2)
    (one,) = (store.root / "state_1").glob("*.distcp")
    first, second = (store.root / "state_2" / name for name in (FIRST, SECOND))
    sizes = [each.stat().st_size for each in (first, second, one)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.2)
    assert sum(sizes[:2]) == pytest.approx(sizes[2], rel=0.2)


def test_weights_go_from_any_number_of_ranks_to_any_other(store: Store) -> None:
    counts = (1, 2, 4, 1)
    for version, (before, after) in enumerate(pairwise(counts), start=1):
        store.save(version, ranks=before)
        answers = store.restore(before) + store.restore(after)
        assert {number for number, *_ in answers} == {version}
        assert len({digest for _, digest, _ in answers}) == 1


def test_tensors_of_fewer_rows_than_ranks_come_back(world: World, tmp_path: Path) -> None:
    for answer in world.run(4, "checkpoint_jobs:uneven", directory=tmp_path):
        for rows in (1, 2, 5):
            values = [value for row in answer[f"{rows} rows"] for value in row]
            assert values == [float(each) for each in range(3 * rows)]


@pytest.mark.parametrize("name", [FIRST, SECOND, ".metadata", "counters.json"])
@pytest.mark.parametrize("damage", ["a flipped bit", "missing"])
def test_a_checkpoint_with_a_damaged_file_is_passed_over_whoever_reads_it(
    store: Store, name: str, damage: str
) -> None:
    assert store.save(10) == store.save(20) == OK
    file = store.root / "state_20" / name
    if damage == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert {version for version, *_ in store.restore(2)} == {10}
    assert store.names == ["LATEST", "corrupt_20", "state_10"]


@pytest.mark.parametrize("lost", [SECOND, ".metadata"])
def test_a_file_that_goes_while_it_is_read_fails_the_restore_on_all(
    store: Store, lost: str
) -> None:
    store.save(10)
    raised = [kind for _, _, kind in store.restore(2, lost=lost)]
    alone = lost == SECOND  # the second rank's weights, which only it reads
    assert raised == ["PeerFailed" if alone else "CheckpointFailed", "CheckpointFailed"]
