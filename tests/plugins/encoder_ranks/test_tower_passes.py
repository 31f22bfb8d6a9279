"""A tower that computes pictures in microbatches: what is in one, and what their gradients add up to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.messages.media import Media
from offbeat.models.media_rules import MediaRules
from offbeat.plugins.encoder_ranks.encoding import TowerPasses
from offbeat.plugins.images.families import PatchRules, PixelRules
from offbeat.plugins.images.pictures import Pictures
from tests.support.image_text_models import patched, pictures

PIXELS, PATCHES = PixelRules(60, (3, 32, 32), 4), PatchRules(60, 3 * 8 * 8, 2)
GRIDS = st.lists(st.tuples(st.just(1), st.sampled_from([2, 4, 6]), st.sampled_from([2, 8])))


@given(grids=GRIDS.filter(bool), max_tokens=st.integers(1, 30))
def test_microbatches_hold_every_picture_once_and_no_more_tokens_than_are_allowed(
    grids: list[tuple[int, int, int]], max_tokens: int
) -> None:
    whole = patched(0, *grids)
    cut = PATCHES.cut(whole, max_tokens)
    for name in ("media_values", "media_sizes"):
        assert np.array_equal(np.concatenate([each[name] for each in cut]), whole[name])
    tokens = [PATCHES.count_features(each) for each in cut]
    for each, count in zip(cut, tokens, strict=True):
        assert count <= max_tokens or len(Pictures.of(each).sizes) == 1
        assert PATCHES.problem([60] * count, each, is_history=False) == ""
    firsts = [PATCHES.count_features(Pictures.of(each).between(0, 1).media) for each in cut[1:]]
    assert all(
        count + first > max_tokens for count, first in zip(tokens[:-1], firsts, strict=True)
    ), "a picture that had room began another microbatch"


@pytest.mark.parametrize(
    ("max_tokens", "want"), [(20, [5]), (19, [4, 1]), (8, [2, 2, 1]), (1, [1] * 5)]
)
def test_pictures_of_one_size_are_cut_by_their_number(max_tokens: int, want: list[int]) -> None:
    cut = PIXELS.cut(pictures(0, 5), max_tokens)
    assert [len(Pictures.of(each).sizes) for each in cut] == want
    assert all(
        PIXELS.count_features(each) * 3 * 32 * 32 == 4 * len(each["media_values"]) for each in cut
    )


class Tower:
    """A tower of one weight, which knows how many graphs of it there are at once."""

    def __init__(self, rules: MediaRules) -> None:
        self._rules = rules
        self.weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        self.passes = list[tuple[int, bool]]()  # tokens, and whether with a graph
        self.graphs = self.most_graphs = 0

    def encode(self, media: Media, has_graph: bool) -> Tensor:
        tokens = self._rules.count_features(media)
        self.passes.append((tokens, has_graph))
        seen = torch.from_numpy(media["media_values"]).double().view(tokens, -1)[:, :3]
        with torch.set_grad_enabled(has_graph):
            made = torch.stack([(seen * self.weight).sin(), seen * self.weight**2])
        if has_graph:
            self.graphs += 1
            self.most_graphs = max(self.most_graphs, self.graphs)
            made.register_hook(self._done)
        return made

    def _done(self, _: Tensor) -> None:
        self.graphs -= 1


def passed(
    max_tokens: int | None, count: int = 0, *, own: int = 5
) -> tuple[Tower, Tensor, Tensor | None]:
    """A tower after both passes, its features, and the gradient of its weight."""
    tower = Tower(PIXELS)
    whole = pictures(0, own) if own else None
    cut = [] if whole is None else [whole] if max_tokens is None else PIXELS.cut(whole, max_tokens)
    passes = TowerPasses(cut, max(count, len(cut)), pictures(9), tower.encode)
    made = passes.forward(trained=True)
    assert not made.requires_grad
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=made.shape))
    passes.backward(weights)
    return tower, made, tower.weight.grad


@pytest.mark.parametrize("max_tokens", [4, 8, 12, 20])
@pytest.mark.parametrize("more", [0, 3])
def test_features_and_gradients_are_those_of_one_pass_with_one_graph_at_a_time(
    max_tokens: int, more: int
) -> None:
    """Also where other ranks have more microbatches, and this one computes along."""
    _, want, gradient = passed(None)
    count = -(-20 // max_tokens) + more
    tower, made, got = passed(max_tokens, count)
    torch.testing.assert_close(made, want, atol=0, rtol=0)
    torch.testing.assert_close(got, gradient, atol=1e-12, rtol=1e-12)
    assert tower.most_graphs == 1
    assert len(tower.passes) == 2 * count - 1, "the last microbatch is computed once"


def test_a_rank_without_pictures_computes_as_often_and_has_gradients_of_zero() -> None:
    tower, made, gradient = passed(4, 3, own=0)
    assert made.shape == (2, 0, 3)
    assert len(tower.passes) == 5
    assert gradient is not None
    assert not gradient.any()


def test_a_tower_that_is_not_trained_is_computed_once_and_without_a_graph() -> None:
    tower = Tower(PIXELS)
    cut = PIXELS.cut(pictures(0, 5), 8)
    TowerPasses(cut, len(cut), pictures(9), tower.encode).forward(trained=False)
    assert tower.passes == [(8, False), (8, False), (4, False)]
