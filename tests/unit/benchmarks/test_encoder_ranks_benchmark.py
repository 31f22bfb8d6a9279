"""The benchmark of encoder ranks: what counts as waiting, and the figures of its tables."""

from collections import deque

import pytest
import torch
from torch import Tensor

from benchmarks.encoder_ranks import merged, row, table
from benchmarks.encoder_ranks_cases import (
    LAYOUTS,
    PLACEHOLDER,
    SIZES,
    TINY,
    Layout,
    Size,
    StepSeen,
    activation_bytes,
    make_step,
)
from benchmarks.encoder_ranks_job import TimedBridge
from offbeat.messages.media import get_media
from offbeat.plugins.encoder_ranks.bridge import Header, Kind

ALONE = Layout("1 + 1", "torch")


class SlowPeer:
    """A wire to itself; the other end is late for every message, and every tensor takes its time."""

    def __init__(self, late_s: float, tensor_s: float) -> None:
        self.now_s, self._late_s, self._tensor_s = 0.0, late_s, tensor_s
        self._sent = deque[Tensor]()

    def send(self, tensor: Tensor, rank: int) -> None:
        if self._is_payload(tensor):
            self._sent.append(tensor)

    def receive(self, tensor: Tensor, rank: int) -> None:
        if self._is_payload(tensor):
            tensor.copy_(self._sent.popleft())

    def _is_payload(self, tensor: Tensor) -> bool:
        is_payload = tensor.dtype != torch.uint8
        self.now_s += self._tensor_s if is_payload else self._late_s
        return is_payload


@pytest.mark.parametrize("ways", ["send", "send and receive"])
def test_what_passes_until_both_ends_are_there_is_not_inside_a_message(ways: str) -> None:
    wire = SlowPeer(late_s=50.0, tensor_s=1.0)
    bridge = TimedBridge(0, wire, lambda: wire.now_s)
    values, messages = torch.randn(1, 4, 8), 1
    bridge.send(Header(1, 1, Kind.FEATURES, 0, 9, 0, 0, 0, 0), values, 1)
    if "receive" in ways:
        due = Header(1, 1, Kind.FEATURES, 0, 9, 0, 4, 0, 0)
        assert torch.equal(bridge.receive(due, 1), values)
        messages = 2
    assert bridge.inside_s == 2.0 * messages  # header and values
    assert bridge.waited_s == 100.0 * messages  # a byte each way


@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_every_group_has_a_picture_of_its_own_with_a_placeholder_for_each_of_its_features(
    size: Size,
) -> None:
    groups = make_step(size, size.groups).groups
    pictures = [get_media(group) for group in groups]
    assert (
        len({each["media_values"].tobytes() for each in pictures if each is not None})
        == size.groups
    )
    for group in groups:
        assert (group["prompt_ids"] == PLACEHOLDER).sum() == size.picture_tokens
        assert not (group["response_ids"] == PLACEHOLDER).any()


def test_activations_are_the_features_and_their_gradients_in_float32() -> None:
    # 8 pictures of 2 x 2 tokens, 32 wide, there and back
    assert activation_bytes(TINY) == 2 * (8 * 4 * 32) * 4


def test_a_step_takes_as_long_as_its_slowest_rank_and_each_figure_is_of_the_highest() -> None:
    first, second = StepSeen(2.0, 0.5, 0.1, 900), StepSeen(3.0, 0.25, 1.5, 900)
    assert merged([[first], [second]]) == [StepSeen(3.0, 0.5, 1.5, 900)]


def test_a_row_has_medians_and_the_share_of_each_step_by_itself() -> None:
    size, moved = TINY, activation_bytes(TINY) + 144
    steps = [StepSeen(wall, inside, 0.3, moved) for wall, inside in ((1, 0.1), (10, 0.2), (2, 0.1))]
    found = row(ALONE, size, steps)
    assert (found.step_s, found.inside_s) == (2, 0.1)
    assert found.share == pytest.approx(0.05)
    assert found.highest_share == pytest.approx(0.1)
    assert found.header_bytes == 144


def test_the_table_names_the_rows_that_miss_the_bar() -> None:
    moved = activation_bytes(TINY) + 144
    good = row(ALONE, TINY, [StepSeen(1.0, 0.049, 0.3, moved)])
    bad = row(LAYOUTS["megatron 1 + 1"], TINY, [StepSeen(1.0, 0.051, 0.3, moved)])
    line = "| tiny | 1 + 1 | 1,000.0 ms | 8,336 | 8,192 | 144 | 49.00 ms | 4.9% (highest 4.9%) | 300.0 ms |"
    assert line in table([good])
    assert table([good])[-1].endswith("holds in every row.")
    assert table([good, bad])[-1].endswith("MISSES in tiny, megatron 1 + 1: 5.1%.")
