"""The CPU only stands in for CUDA where somebody said so, and no longer than that."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offbeat.trainers.megatron.errors import UnsupportedLayout

pytest.importorskip("megatron.core", reason="needs the extra megatron")

# The library warns of every kernel it does not find.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def stands_in() -> Callable[[str], Any]:
    from offbeat.trainers.megatron.cpu_shim import cpu_stands_in  # noqa: PLC0415

    return cpu_stands_in


def test_only_a_device_that_is_said_to_be_the_cpu_is_stood_in_for(
    stands_in: Callable[[str], Any],
) -> None:
    with pytest.raises(UnsupportedLayout, match=r"trainer\.device is cuda"), stands_in("cuda"):
        pass


def test_inside_cuda_means_the_cpu_and_outside_nothing_is_left(
    stands_in: Callable[[str], Any],
) -> None:
    before = dict(vars(torch.cuda)), torch.Tensor.cuda
    with stands_in("cpu"):
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).to("cuda").device.type == "cpu"
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.int).dtype == torch.int
    assert (dict(vars(torch.cuda)), torch.Tensor.cuda) == before
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
