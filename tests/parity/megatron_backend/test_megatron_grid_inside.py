"""What is computed inside of a step of a grid beside megatron-core: that of one process, module by module."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from activations import first_apart, gaps
from megatron_cases import JobStep
from megatron_grid_cases import on_grid
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut
from world import World

from tests.support.grid_steps import Families
from tests.support.image_text_models import picture_groups

GRIDS = {"tp2 + 1": Cut(tensor=2, sequence=True), "pp2 + 1": Cut(pipeline=2)}
TOWERS = {
    "idefics3": ("model.vision_model", "model.connector"),
    "qwen2_5_vl": ("model.visual.blocks.?", "model.visual.merger"),
}


@pytest.mark.parametrize("cut", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("family", TOWERS)
def test_each_activation_is_that_of_the_torch_trainer_and_a_fault_is_found_where_it_is(
    world: World, families: Families, family: str, cut: Cut
) -> None:
    """Hidden states and logits where a wanted token is predicted; of the tower everything."""
    groups, rng = picture_groups((1, 2, 0, 1, 1, 0), family=family), np.random.default_rng(1)
    advantages = [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups]
    step = JobStep.of(Step(groups, advantages), TOKENS)
    given: dict[str, Any] = {"path": families(family), "step": step, "tower": TOWERS[family]}

    def in_the_grid(kind: str) -> dict[str, Any]:
        at = replace(cut, max_tokens=1000)
        *lane, encoder = on_grid(
            world, "megatron_grid_inside_jobs:inside", at, 1, **given, kind=kind
        )
        found = dict(encoder)
        for each in lane:
            for name, values in each.items():
                assert np.array_equal(found.setdefault(name, values), values), name
        return gaps(found, want)

    (want,) = world.run(1, "megatron_grid_inside_jobs:inside_one", **given)
    assert [name for name in want if not name.startswith("model.")] == [
        "layer 0",
        "layer 1",
        "head",
    ]
    right, bound = in_the_grid("ExactEncoder"), 1e-11
    assert first_apart(right, bound) == ""
    assert min(each.cosine for each in right.values()) == pytest.approx(1, abs=bound)
    rounded = in_the_grid("RoundsFeatures")
    assert first_apart(rounded, 1e-5) == "layer 0"
    assert rounded["layer 1"].cosine < 1 - 1e-9
