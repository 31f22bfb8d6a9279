"""Towers of Qwen's families pack pictures of any sizes into one row, cut by ``cu_seqlens``."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.plugins.images.pictures import merge
from tests.support.image_text_models import make, patched
from tests.support.pictures import features

GRIDS = [((1, 4, 4),), ((1, 4, 6), (1, 2, 2)), ((1, 8, 2),)]  # of three prompts, none like another
BY_FOURS = [((1, 4, 4),), ((1, 4, 6), (1, 4, 2)), ((1, 8, 2),)]  # features of each prompt: 4, 8, 4
PATCHES = [rows * columns for grids in GRIDS for _, rows, columns in grids]
FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads may cut a float32 product elsewhere for another number of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cuts_of(model: Any, media: Any) -> list[Tensor]:
    """What each attention of the tower was given as ``cu_seqlens``, first layer first."""
    seen = list[Tensor]()

    def note(_: Any, __: Any, named: dict[str, Any]) -> None:
        seen.append(named["cu_seqlens"])

    for block in model.model.visual.blocks:
        block.attn.register_forward_pre_hook(note, with_kwargs=True)
    features(model, (media,))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attention_is_cut_between_pictures_by_int32_numbers_beside_the_weights(family: str) -> None:
    model: Any = make(family)
    media = merge([patched(seed, *grids) for seed, grids in enumerate(GRIDS)])
    between = {0, *accumulate(PATCHES)}
    cuts = cuts_of(model, media)
    assert len(cuts) == 2
    for each in cuts:
        assert (each.dtype, each.device) == (torch.int32, model.device)
        assert between <= set(each.tolist())  # windows of a picture are cut further
    assert set(cuts[-1].tolist()) == between


@pytest.mark.parametrize(
    ("dtype", "grids", "largest_gap"),
    [
        (torch.float64, BY_FOURS, 0.0),
        # On some CPUs BLAS chooses the kernel of a float32 product by its number of rows.
        (torch.float32, GRIDS, 5e-6),
        (torch.bfloat16, GRIDS, 0.0),
        # BLAS sums the last rows of a float64 product otherwise, unless four divides their number.
        (torch.float64, GRIDS, 1e-14),
    ],
    ids=["float64 by fours", "float32", "bfloat16", "float64"],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("one_thread")
@torch.no_grad()
def test_pictures_of_unequal_sizes_have_the_features_of_each_alone(
    family: str, dtype: torch.dtype, grids: Any, largest_gap: float
) -> None:
    model = make(family, dtype)
    each = [patched(seed, *of_one) for seed, of_one in enumerate(grids)]
    together = features(model, (merge(each),))
    apart = [features(model, (media,)) for media in each]
    want = torch.cat([one.embedded_FH for one in apart])
    torch.testing.assert_close(together.embedded_FH, want, atol=largest_gap, rtol=0)
    for layer, deep in enumerate(together.deep):
        want = torch.cat([one.deep[layer] for one in apart])
        torch.testing.assert_close(deep, want, atol=largest_gap, rtol=0)
