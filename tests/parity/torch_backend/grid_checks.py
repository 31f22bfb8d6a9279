"""Steps of a grid of language ranks and encoder ranks beside that of one process."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
from parity_cases import Cut, Step
from world import World

from tests.support.grid_steps import pictured

TOWER: Final = ("model.vision_model.*", "model.connector.*")
MIXED, TEXT, FIRST, EQUAL = (1, 2, 0, 1, 1, 0, 2), (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1)
"""Numbers of pictures of the groups of a step."""
UNDIVIDED, ENCODERS, BOTH_SIDES = Cut(), Cut(encoder_tensor=2), Cut(tensor=2, encoder_tensor=2)


@dataclass(frozen=True)
class Grid:
    """Lanes of the language model and encoders, each cut over ranks of its own."""

    lanes: int = 1
    encoders: int = 0  # 0: every rank holds both sides
    cut: Cut = UNDIVIDED

    @property
    def language(self) -> int:
        """Number of language ranks."""
        return self.lanes * self.cut.tensor

    @property
    def ranks(self) -> int:
        return self.language + self.encoders * self.cut.encoder_tensor

    def __str__(self) -> str:
        return f"{self.language} + {self.ranks - self.language}"

    def run(self, world: World, job: str, **given: Any) -> list[Any]:
        """What each rank answers to a job of ``grid_jobs``; of another module: ``module:name``."""
        module, _, name = job.rpartition(":")
        given = {"cut": self.cut, "lanes": self.lanes, "encoders": self.encoders, **given}
        return world.run(self.ranks, f"{module or 'grid_jobs'}:{name}", **given)

    def with_cut(self, **changes: Any) -> "Grid":
        return replace(self, cut=replace(self.cut, **changes))


WHOLE: Final = {"1 + 1": Grid(1, 1), "2 + 1": Grid(2, 1), "2 + 2": Grid(2, 2)}
DIVIDED: Final = {
    "1 + 2, the tower divided": Grid(1, 1, ENCODERS),
    "2 + 2, both sides divided": Grid(1, 1, BOTH_SIDES),
    "2 + 2, the tower divided for two lanes": Grid(2, 1, ENCODERS),
    "2 + 1, the language model divided": Grid(1, 1, Cut(tensor=2)),
    "2 + 4, two divided towers": Grid(2, 2, ENCODERS),
}
GRIDS: Final = WHOLE | DIVIDED


def random_step(counts: tuple[int, ...], family: str = "idefics3") -> Step:
    """A step on groups with so many pictures each."""
    return Step(*pictured(counts, family))


def both(world: World, grid: Grid, **given: Any) -> tuple[Any, list[Any]]:
    """What one process saw of a step, and what each rank of a grid did."""
    alone = Grid(cut=replace(grid.cut, tensor=1, encoder_tensor=1))
    (one,) = alone.run(world, "stepped", **given)
    return one, grid.run(world, "stepped", **given)


def assert_step_of_one_process(world: World, grid: Grid, **given: Any) -> list[Any]:
    """Return what each rank saw, whose gradients and outcome are those of one process."""
    one, ranks = both(world, grid, **given)
    assert gradient_error(one, ranks, grid.language) <= 1e-10
    assert_same_outcome(one, ranks)
    return ranks


def gradient_error(one: Any, ranks: list[Any], language: int) -> float:
    """Largest difference of any gradient, over the largest of all, in any number of chunks.

    ``language``: number of language ranks. Every rank of a side has the gradients of its side. A
    weight that no row uses has none on one rank, and zeros on several.
    """
    errors = list[float]()
    for chunks, want in one["gradients"].items():
        largest = max(np.abs(each).max() for each in want.values())
        seen = [each["gradients"][chunks] for each in ranks]
        for decoder, tower in product(seen[:language], seen[language:]):
            assert not decoder.keys() & tower.keys()
            got = decoder | tower
            assert got.keys() >= want.keys()
            assert not any(got[name].any() for name in got.keys() - want.keys())
            errors += [float(np.abs(got[name] - want[name]).max() / largest) for name in want]
    return max(errors)


def assert_same_outcome(one: Any, ranks: list[Any]) -> None:
    assert {each["digest"] for each in ranks} == {ranks[0]["digest"]}
    assert {each["initial"] for each in ranks} == {one["initial"]}
    assert {each["parameters"] for each in ranks} == {one["parameters"]}
    assert all(each["identity"] == one["identity"] for each in ranks)
    for name, weight in one["weights"].items():
        np.testing.assert_allclose(ranks[0]["weights"][name], weight, atol=1e-9, rtol=0)
    for each in ranks:
        result = each["result"]
        assert result.applied
        assert (result.tokens, result.sequences) == (one["result"].tokens, one["result"].sequences)
        assert result.grad_norm == pytest.approx(one["result"].grad_norm, rel=1e-7)
        for group, columns in each["logprobs"].items():
            for name, values in columns.items():
                np.testing.assert_allclose(values, one["logprobs"][group][name], atol=1e-6, rtol=0)
    assert ranks[0]["canary"][0] == one["canary"][0]
    np.testing.assert_allclose(ranks[0]["canary"][1], one["canary"][1], atol=1e-6)
