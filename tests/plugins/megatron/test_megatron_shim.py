"""The CPU only stands in for CUDA where somebody said so, and no longer than that."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3MoeConfig

from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.plugins.megatron.errors import UnsupportedLayout

pytest.importorskip("megatron.core", reason="needs the extra megatron")

# The library warns of every kernel it does not find.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def stands_in() -> Callable[[str], Any]:
    from offbeat.plugins.megatron.cpu_shim import cpu_stands_in  # noqa: PLC0415

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


def test_the_shim_binds_no_name_that_the_library_lacks_on_cuda(
    stands_in: Callable[[str], Any],
) -> None:
    before = _library_names()
    with stands_in("cpu"):
        assert _library_names() == before


def _library_names() -> dict[str, set[str]]:
    modules = dict(sys.modules)
    return {name: set(vars(modules[name])) for name in modules if name.startswith("megatron.")}


def test_a_router_scores_tokens_without_the_shim(tmp_path: Path) -> None:
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415

    from offbeat.plugins.megatron.router import ExpertRouter  # noqa: PLC0415

    Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, hidden_size=8).save_pretrained(tmp_path)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=4,
        add_bias_linear=False,
        moe_router_dtype="fp32",
        params_dtype=torch.bfloat16,
        perform_initialization=False,
    )
    groups: Any = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    router = ExpertRouter(read_architecture(tmp_path), config=config, pg_collection=groups)
    torch.nn.init.normal_(router.weight)
    hidden_TRH = torch.randn(3, 2, 8).bfloat16()
    weights_TE, chosen_TE = router(hidden_TRH)
    scores_TE = functional.linear(hidden_TRH.float(), router.weight.float()).view(6, 4).softmax(-1)
    torch.testing.assert_close(weights_TE[chosen_TE], scores_TE[chosen_TE])
    weights_TE.sum().backward()
    assert router.weight.grad is not None
