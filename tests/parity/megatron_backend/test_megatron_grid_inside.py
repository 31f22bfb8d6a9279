"""What is computed inside of a step of a grid beside megatron-core: that of one process, module by module."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from activations import first_apart, gaps
from megatron_cases import JobStep
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut
from world import World

from tests.support.image_text_models import make, picture_groups

GRIDS = {"tp2 + 1": Cut(tensor=2, sequence=True), "pp2 + 1": Cut(pipeline=2)}
TOWERS = {
    "idefics3": ("model.vision_model", "model.connector"),
    "qwen2_5_vl": ("model.visual.blocks.?", "model.visual.merger"),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    def path_of(family: str) -> Path:
        path = root / family
        if not path.exists():
            make(family).save_pretrained(path)
            (path / "tokenizer.json").write_text("{}")
        return path

    return path_of


@pytest.mark.parametrize("cut", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("family", TOWERS)
def test_each_activation_is_that_of_the_torch_trainer_and_a_fault_is_found_where_it_is(
    world: World, families: Callable[[str], Path], family: str, cut: Cut
) -> None:
    """Hidden states and logits where a wanted token is predicted; of the tower everything."""
    groups, rng = picture_groups((1, 2, 0, 1, 1, 0), family=family), np.random.default_rng(1)
    advantages = [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups]
    step = JobStep.of(Step(groups, advantages), TOKENS)
    given: dict[str, Any] = {"path": families(family), "step": step, "tower": TOWERS[family]}

    def in_the_grid(kind: str) -> dict[str, Any]:
        shape = {"cut": replace(cut, max_tokens=1000), "encoders": 1, "kind": kind}
        job = {"name": "inside", "arguments": {**given, **shape}}
        *lane, encoder = world.run(cut.ranks + 1, "megatron_grid_inside_jobs:run", **job)
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
