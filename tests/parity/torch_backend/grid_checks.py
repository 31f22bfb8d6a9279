"""Steps of a grid of language ranks and encoder ranks beside that of one process."""

from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
from parity_cases import Cut, Step
from world import World

from tests.support.image_text_models import picture_groups

WHOLE: Final = Cut()


def random_step(counts: tuple[int, ...], family: str = "idefics3") -> Step:
    """A step on groups with so many pictures each."""
    groups, rng = picture_groups(counts, family=family), np.random.default_rng(1)
    return Step(groups, [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups])


def both(
    world: World, lanes: int, encoders: int, cut: Cut = WHOLE, **given: Any
) -> tuple[Any, list[Any]]:
    """What one process saw, and what each rank of a grid did."""
    alone = replace(cut, tensor=1, encoder_tensor=1)
    (one,) = world.run(1, "grid_jobs:stepped", lanes=1, encoders=0, cut=alone, **given)
    ranks = lanes * cut.tensor + encoders * cut.encoder_tensor
    sides = {"lanes": lanes, "encoders": encoders, "cut": cut}
    return one, world.run(ranks, "grid_jobs:stepped", **sides, **given)


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


def same_outcome(one: Any, ranks: list[Any]) -> None:
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
