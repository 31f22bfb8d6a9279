"""Calls in the midst of an open step: log-probabilities and canaries leave its gradients as they are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_world import MegatronWorld
from parity_cases import BALANCED, TOKENS, MegatronCut, Step

CUTS = {
    "dp2, overlap": ("qwen3", MegatronCut(data=2, overlap=True)),
    "pp2": ("qwen3", MegatronCut(pipeline=2)),
    "tp2, sequence": ("qwen3", MegatronCut(tensor=2, sequence=True)),
    "cp2": ("qwen3", MegatronCut(context=2)),
    "balanced experts, ep2": ("glm4-moe", MegatronCut(data=2, expert=2, moe=BALANCED)),
}


@pytest.mark.parametrize(("model", "cut"), CUTS.values(), ids=CUTS.keys())
def test_logprobs_and_canaries_behind_every_chunk_leave_the_step_as_it_is(
    megatron_world: MegatronWorld,
    models: Callable[[str], Path],
    step: Step,
    model: str,
    cut: MegatronCut,
) -> None:
    given = {"path": models(model), "cut": cut, "step": JobStep.of(step, TOKENS)}
    prompts = [[5, 9, 33, 2], [1, 2, 3, 4]]
    replies = megatron_world.run(2, "asked_in_between", prompts=prompts, **given)
    for (*disturbed, first, second), changed in replies:
        assert changed == [[]] * len(changed)
        for got, want in zip(disturbed, (first, second), strict=True):
            assert got.result.metrics == want.result.metrics
            assert got.result.grad_norm == want.result.grad_norm
            assert all(
                np.array_equal(got.weights[name], want.weights[name]) for name in want.weights
            )
        assert any((second.weights[name] != first.weights[name]).any() for name in first.weights)
