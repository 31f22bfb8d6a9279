"""States of a world: written under one layout, taken up under another, and the next step is the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_world import MegatronWorld
from parity_cases import BALANCED, BOUND, TOKENS, Step, worst_relative_error
from parity_cases import MegatronCut as Cut

Models = Callable[[str], Path]
OPTIONS = {"learning_rate": 1e-2, "eps": 1e-2}
ONE, DATA, TENSOR, PIPELINE = Cut(), Cut(data=2), Cut(tensor=2), Cut(pipeline=2)
EXPERT = Cut(data=2, expert=2)
ALL = Cut(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True)
CHANGES = {
    "dp1-dp2": ("qwen3-tied", ONE, DATA),
    "dp2-dp1": ("qwen3-tied", DATA, ONE),
    "tp1-tp2": ("qwen3-tied", ONE, TENSOR),
    "tp2-tp1": ("qwen3-tied", TENSOR, ONE),
    "tp2-pp2": ("qwen3-tied", TENSOR, PIPELINE),
    "pp2-tp2dp2": ("qwen3-tied", PIPELINE, Cut(tensor=2, data=2)),
    "ep1-ep2": ("moe", ONE, EXPERT),
    "ep2-ep1": ("moe", EXPERT, ONE),
    "ep2-tp2ep2": ("moe", EXPERT, ALL),
    "tp2etp2ep2-tp2dp2ep4": ("moe", ALL, replace(ALL, expert=4, expert_tensor=1)),
    "tp2ep2-tp2": ("moe", replace(ALL, data=1, expert_tensor=1), Cut(tensor=2, sequence=True)),
    "balanced experts, ep2-pp2": (
        "glm4-moe",
        replace(EXPERT, moe=BALANCED),
        replace(PIPELINE, stages=(2, 1), moe=BALANCED),
    ),
    "tp4 of 2 key-value heads-tp2": ("qwen3-tied", Cut(tensor=4), TENSOR),
    "pp2-tp4 of 2 key-value heads": ("qwen3-tied", PIPELINE, Cut(tensor=4)),
    "cp2-tp2": ("qwen3-tied", Cut(context=2), TENSOR),
    "pp2 of 2 + 1 layers-1 + 2": (
        "qwen3-3",
        replace(PIPELINE, stages=(2, 1)),
        replace(PIPELINE, stages=(1, 2)),
    ),
}


@pytest.mark.parametrize(("model", "written", "read"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_state_is_taken_up_under_another_layout(
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    tmp_path: Path,
    model: str,
    written: Cut,
    read: Cut,
    dtype: str,
) -> None:
    path, job_step = models(model), JobStep.of(step, TOKENS)
    written, read = (replace(each, optimizer=OPTIONS, dtype=dtype) for each in (written, read))
    before = megatron_world.run(
        written.ranks, "saved", path=path, cut=written, step=job_step, directory=tmp_path
    )
    want, digest = before[0]
    loss_bound, weight_bound = (BOUND, BOUND) if dtype == "float64" else (0.02, 0.05)
    for second, taken_up, initial, applied, reset in megatron_world.run(
        read.ranks, "loaded", path=path, cut=read, step=job_step, directory=tmp_path
    ):
        assert (taken_up, applied) == (digest, 1)
        assert reset == (initial, 0)
        assert initial != digest
        assert second.result.loss == pytest.approx(want.result.loss, rel=loss_bound)
        assert second.result.grad_norm == pytest.approx(want.result.grad_norm, rel=weight_bound)
        assert worst_relative_error(second.weights, want.weights) <= weight_bound
        assert second.in_step


def test_a_state_is_taken_up_bit_for_bit_under_its_own_layout(
    megatron_world: MegatronWorld, models: Models, step: Step, tmp_path: Path
) -> None:
    path, job_step = models("glm4-moe"), JobStep.of(step, TOKENS)
    cut = Cut(data=2, expert=2, dtype="bfloat16", optimizer=OPTIONS, moe=BALANCED)
    before = megatron_world.run(2, "saved", path=path, cut=cut, step=job_step, directory=tmp_path)
    after = megatron_world.run(2, "loaded", path=path, cut=cut, step=job_step, directory=tmp_path)
    for (want, digest), (got, taken_up, *_) in zip(before, after, strict=True):
        assert taken_up == digest
        assert got.result.loss == want.result.loss
        assert all((got.weights[name] == want.weights[name]).all() for name in want.weights)


def test_a_trainer_is_the_same_whatever_its_layout_and_another_for_another_model(
    megatron_world: MegatronWorld, models: Models
) -> None:
    qwen3 = [
        identity
        for cut in (ONE, TENSOR, PIPELINE)
        for identity, _ in megatron_world.run(
            cut.ranks, "identities", path=models("qwen3"), cut=cut
        )
    ]
    assert len(set(qwen3)) == 1
    ((tied, _),) = megatron_world.run(1, "identities", path=models("qwen3-tied"), cut=ONE)
    assert tied != qwen3[0]
