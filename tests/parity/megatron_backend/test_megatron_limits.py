"""What the library, or gloo, does not do: each limit of docs/megatron.md is still there.

A test that fails here says that something has become possible, or needs no work-around any longer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron_cases import JobStep
from megatron_world import MegatronWorld
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut

Models = Callable[[str], Path]


@pytest.mark.filterwarnings("ignore")  # of every kernel that the library does not find
def test_the_librarys_own_attention_refuses_context_parallelism() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=2
    )
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        DotProductAttention(config, 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize(
    ("model", "cut", "options", "said"),
    [
        (
            "moe",
            Cut(tensor=2, sequence=True),
            {"sequence_parallel": False},
            "ValueError: During training, performance may degrade if MoE and tensor parallelism",
        ),
    ],
    ids=["experts, tp2 without sequence"],
)
def test_what_is_not_offered_is_refused_below(
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    model: str,
    cut: Cut,
    options: dict[str, Any],
    said: str,
) -> None:
    for answer in megatron_world.run(
        cut.ranks,
        "refused",
        path=models(model),
        cut=cut,
        step=JobStep.of(step, TOKENS),
        options=options,
    ):
        assert answer.startswith(said)


@pytest.mark.parametrize(
    ("model", "cut", "said"),
    [
        ("moe", Cut(tensor=2), "trainer.sequence_parallel is false. Set it to true"),
        ("qwen3", Cut(sequence=True), "trainer.sequence_parallel is true. Set it to false"),
        (
            "qwen3",
            Cut(tensor=3),
            "trainer.tensor_parallel is 3. Set it to a divisor or a multiple of the model's 2 key-",
        ),
        ("qwen3", Cut(data=2, expert=2), "trainer.expert_parallel is 2. Set it to a divisor of"),
        (
            "qwen3-3",
            Cut(pipeline=2),
            "trainer.pipeline_parallel is 2. Set it to a divisor of the model's 3 layers, or trainer.",
        ),
        (
            "qwen3-3",
            Cut(pipeline=2, stages=(1, 1)),
            "trainer.layers_per_stage is 1 + 1. Set it to numbers that add up to the model's 3 layers",
        ),
    ],
    ids=[
        "experts, tp2",
        "sequence of one",
        "tp3 of two key-value heads",
        "experts of none",
        "3 layers on 2 stages",
        "stages of 2 of 3 layers",
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_built(
    megatron_world: MegatronWorld, models: Models, step: Step, model: str, cut: Cut, said: str
) -> None:
    for answer in megatron_world.run(
        cut.ranks,
        "refused",
        path=models(model),
        cut=cut,
        step=JobStep.of(step, TOKENS),
        options={},
    ):
        assert answer.startswith(f"UnsupportedLayout: {said}")
