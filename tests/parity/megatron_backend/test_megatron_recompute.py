"""Layers of megatron-core that are computed again in backward: the same step to the last bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_cases import JobStep, Told
from megatron_world import MegatronWorld
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut

Models = Callable[[str], Path]
LAYOUTS = {
    "one rank": ("qwen3", Cut()),
    "padded": ("qwen3", Cut(shared_prompt=False, max_tokens=100)),
    "dp2": ("qwen3", Cut(data=2)),
    "tp2, sequence": ("qwen3", Cut(tensor=2, sequence=True)),
    "tp2 x pp2": ("qwen3", Cut(tensor=2, pipeline=2)),
    "experts, ep2": ("moe", Cut(data=2, expert=2)),
    "cp2": ("qwen3", Cut(context=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_is_computed_twice_and_the_step_is_the_same_to_the_last_bit(
    megatron_world: MegatronWorld, models: Models, step: Step, layout: str
) -> None:
    model, cut = LAYOUTS[layout]
    answers: list[list[tuple[Told, int]]] = megatron_world.run(
        cut.ranks, "recomputed", path=models(model), cut=cut, step=JobStep.of(step, TOKENS)
    )
    for (kept, once), (again, twice) in answers:
        assert twice == 2 * once > 0
        assert again.in_step
        assert again.result.metrics == kept.result.metrics
        for name, gradient in kept.gradients.items():
            assert (gradient == again.gradients[name]).all(), name
        for name, weight in kept.weights.items():
            assert (weight == again.weights[name]).all(), name
