"""The speed of a device that a step reports: what is counted does not depend on backend or layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_world import MegatronWorld
from parity_cases import TOKENS, Cut, Step
from parity_cases import MegatronCut as MCut
from world import World

Models = Callable[[str], Path]
APART: dict[str, Any] = {
    "shared_prompt": False
}  # so that every layout computes the same tokens and pairs
DENSE = (
    MCut(**APART),
    MCut(tensor=2, **APART),
    MCut(pipeline=2, **APART),
    MCut(context=2, **APART),
)
EXPERTS = (MCut(**APART), MCut(data=2, expert=2, **APART), MCut(tensor=2, sequence=True, **APART))


@pytest.mark.parametrize(
    ("model", "cuts"),
    [("qwen3", DENSE), ("moe", EXPERTS), ("qwen2-moe", EXPERTS[:1]), ("glm4-moe", EXPERTS[:2])],
)
def test_a_token_has_the_flops_of_the_torch_trainer_in_every_layout(
    world: World,
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    model: str,
    cuts: tuple[MCut, ...],
) -> None:
    path = models(model)
    given = {"path": path, "cut": Cut(**APART), "step": step, "loss": TOKENS}
    (torch_alone,) = world.run(1, "torch_backend.torch_jobs:single", **given)
    want = flops_of_a_token(torch_alone.result.speed)
    for cut in cuts:
        for told in megatron_world.run(
            cut.ranks, "single", path=path, cut=cut, step=JobStep.of(step, TOKENS)
        ):
            assert told.result.speed["throughput/device_tokens_per_s"] > 0
            assert flops_of_a_token(told.result.speed) == pytest.approx(want, rel=1e-12)


def flops_of_a_token(speed: dict[str, float]) -> float:
    assert "throughput/mfu" not in speed  # of a CPU no peak is known
    return speed["throughput/device_flop_per_s"] / speed["throughput/device_tokens_per_s"]
