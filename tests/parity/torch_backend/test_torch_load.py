"""A model that is cut over ranks is read by the first one alone: the others hold their part only."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from parity_cases import Cut
from world import World

Models = Callable[[str], Path]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *itertools.product(["qwen3", "qwen3-tied", "moe"], ["float32", "bfloat16"]),
        ("dots1", "bfloat16"),  # the biases of its routers stay in float32
    ],
)
def test_ranks_that_have_no_file_of_the_weights_hold_them_all_the_same(
    world: World, models: Models, tmp_path: Path, model: str, dtype: str
) -> None:
    path, cut = models(model), Cut(dtype=dtype)
    shutil.copy2(path / "config.json", tmp_path)
    ((want, _),) = world.run(1, "torch_jobs:loaded", path=path, cut=cut)
    for got, reset in world.run(2, "torch_jobs:loaded", path=path, cut=cut, bare=tmp_path):
        assert got == want
        assert reset == want
