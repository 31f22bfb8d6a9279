"""An image-text model over one and two ranks: the same step, state and export."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_cases import BOUND, Cut, Step
from transformers import AutoModelForImageTextToText
from world import World

from tests.support.image_text_models import make, picture_groups


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idefics3")
    make("idefics3").save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def random_step(*counts: int) -> Step:
    """A step on groups with so many pictures each."""
    groups, rng = picture_groups(counts), np.random.default_rng(1)
    return Step(groups, [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups])


@pytest.mark.parametrize(
    ("frozen", "recompute", "counts"),
    [
        (False, False, (1, 2, 0, 1, 1)),
        (False, True, (1, 0, 0, 0)),  # one rank has no picture
        (True, True, (1, 2, 0, 0)),
    ],
    ids=["trained", "trained, recomputed, a rank without pictures", "frozen, recomputed"],
)
def test_two_ranks_train_on_pictures_as_one_does(
    world: World,
    idefics3: Path,
    tmp_path: Path,
    frozen: bool,
    recompute: bool,
    counts: tuple[int, ...],
) -> None:
    given: dict[str, Any] = {
        "path": idefics3,
        "cut": Cut(recompute=recompute),
        "step": random_step(*counts),
        "frozen": frozen,
    }
    for name in ("one", "two"):
        (tmp_path / name / "state").mkdir(parents=True)
    (one,) = world.run(1, "picture_jobs:trained", root=tmp_path / "one", **given)
    for seen in world.run(2, "picture_jobs:trained", root=tmp_path / "two", **given):
        largest = max(np.abs(each).max() for each in one["gradients"].values())
        assert seen["gradients"].keys() == one["gradients"].keys()
        for name, gradient in one["gradients"].items():
            assert np.abs(seen["gradients"][name] - gradient).max() <= BOUND * largest
        assert seen["digest"] == seen["loaded"]
        assert seen["after reset"] == one["after reset"] != one["digest"]
    export: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "two" / "export")
    for name, weight in export.named_parameters():
        np.testing.assert_allclose(weight.detach().numpy(), one["weights"][name], atol=1e-6)
