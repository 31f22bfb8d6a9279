"""The library's distributed optimizer beside torch's AdamW on every rank, in float32 and with masters.

In production it is the one on CUDA. Here it runs over gloo, through the shim: what is the same on both
is which part of which buffer is whose, the norm, the clip, the decay, and the state.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, Told
from megatron_world import MegatronWorld
from parity_cases import TOKENS, Step, worst_relative_error
from parity_cases import MegatronCut as Cut
from world import WorkerFailed

Models = Callable[[str], Path]
OPTIONS = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "eps": 1e-2,
}
LAYOUTS = {
    "one rank": ("qwen3", Cut()),
    "dp2": ("qwen3", Cut(data=2)),
    "dp4": ("qwen3-tied", Cut(data=4)),
    "dp2, overlap": ("qwen3", Cut(data=2, overlap=True)),
    "tp2": ("qwen3", Cut(tensor=2)),
    "tp2 x dp2, sequence": ("qwen2", Cut(tensor=2, data=2, sequence=True)),
    "pp2 x dp2, tied": ("qwen3-tied", Cut(pipeline=2, data=2)),
    "experts, ep2 of dp4": ("moe", Cut(data=4, expert=2)),
    "cp2 x dp2": ("qwen3", Cut(context=2, data=2)),
    "experts, tp2, sequence": ("moe", Cut(tensor=2, sequence=True)),
    "experts, ep2 of tp2 x dp2, sequence": ("moe", Cut(tensor=2, data=2, expert=2, sequence=True)),
    "experts, tp2 x etp2 x ep2, sequence": (
        "moe",
        Cut(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True),
    ),
}
SHARDED = "ShardedAdamW"
ROUNDING = {"float32": 2e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "cut"), LAYOUTS.values(), ids=LAYOUTS)
def test_three_clipped_steps_end_where_an_optimizer_that_is_not_dealt_ends(
    megatron_world: MegatronWorld, models: Models, step: Step, model: str, cut: Cut, dtype: str
) -> None:
    given = {"path": models(model), "step": JobStep.of(step, TOKENS), "count": 3}
    whole = replace(cut, dtype=dtype, optimizer=OPTIONS)
    want = megatron_world.run(cut.ranks, "steps", cut=whole, **given)[0]
    assert want[0].result.grad_norm > 0.5, "nothing was clipped"
    for outcomes in megatron_world.run(
        cut.ranks, "steps", cut=replace(whole, updates=SHARDED), **given
    ):
        for got, wanted in zip(outcomes, want, strict=True):
            same(got, wanted, ROUNDING[dtype])


def same(got: Told, want: Told, bound: float) -> None:
    assert got.in_step, "replicas or tied copies differ"
    assert got.result.learning_rate == want.result.learning_rate
    assert got.result.loss == pytest.approx(want.result.loss, rel=bound)
    assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=bound)
    assert worst_relative_error(got.weights, want.weights) <= bound


@pytest.mark.parametrize("updates", ["FaultyAdamW", SHARDED])
def test_a_step_that_moves_the_weights_of_no_rank_is_refused_by_name(
    megatron_world: MegatronWorld, models: Models, step: Step, updates: str
) -> None:
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    cut = Cut(data=2, dtype="float32", optimizer=still, updates=updates)
    job_step = JobStep.of(step, TOKENS)
    with pytest.raises(WorkerFailed, match="WeightsUnmoved: step 1 had learning rate"):
        megatron_world.run(2, "split", path=models("qwen3"), cut=cut, step=job_step, chunks=(2,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (Cut(data=2, updates=SHARDED), Cut(data=2, updates=SHARDED)),
        (Cut(data=2, updates=SHARDED), Cut()),
        (Cut(), Cut(data=4, updates=SHARDED)),
        (Cut(data=2, updates=SHARDED), Cut(tensor=2, data=2, updates=SHARDED)),
    ],
    ids=["its own", "to one rank", "from one rank", "to other ranks"],
)
def test_its_state_is_the_others_and_is_taken_up_under_any_layout(
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    tmp_path: Path,
    written: Cut,
    read: Cut,
    dtype: str,
) -> None:
    path, job_step = models("qwen3-tied"), JobStep.of(step, TOKENS)
    written, read = (replace(each, optimizer=OPTIONS, dtype=dtype) for each in (written, read))
    (want, digest), *_ = megatron_world.run(
        written.ranks, "saved", path=path, cut=written, step=job_step, directory=tmp_path
    )
    for second, taken_up, initial, applied, reset in megatron_world.run(
        read.ranks, "loaded", path=path, cut=read, step=job_step, directory=tmp_path
    ):
        assert (taken_up, applied) == (digest, 1)
        assert reset == (initial, 0)
        same(second, want, ROUNDING[dtype])
        if written == read:
            assert all((second.weights[name] == want.weights[name]).all() for name in want.weights)


@pytest.mark.parametrize(
    ("bug", "cut", "shows"),
    [
        (SHARDED, Cut(tensor=2), ""),
        ("UnmarkedMatrices", Cut(tensor=2), "grad_norm"),
        ("DecaysVectors", Cut(data=2), "weights"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_the_library_leaves_to_its_user_is_seen_when_it_is_forgotten(
    megatron_world: MegatronWorld, models: Models, step: Step, bug: str, cut: Cut, shows: str
) -> None:
    given = {"path": models("qwen3"), "step": JobStep.of(step, TOKENS), "count": 2}
    whole = replace(cut, dtype="float32", optimizer=OPTIONS)
    want = megatron_world.run(2, "steps", cut=whole, **given)[0][-1]
    for outcomes in megatron_world.run(2, "steps", cut=replace(whole, updates=bug), **given):
        got = outcomes[-1]
        seen = {
            "grad_norm": abs(got.result.grad_norm / want.result.grad_norm - 1),
            "weights": worst_relative_error(got.weights, want.weights),
        }
        assert not shows or seen[shows] > 10 * ROUNDING["float32"]
        assert shows or max(seen.values()) <= ROUNDING["float32"]


def test_a_state_of_one_ranks_parts_alone_is_seen(
    megatron_world: MegatronWorld, models: Models, step: Step, tmp_path: Path
) -> None:
    path, job_step = models("qwen3-tied"), JobStep.of(step, TOKENS)
    cut = Cut(data=2, dtype="float32", optimizer=OPTIONS, updates="StatesOfParts")
    (want, _), *_ = megatron_world.run(
        2, "saved", path=path, cut=cut, step=job_step, directory=tmp_path
    )
    for second, *_ in megatron_world.run(
        2, "loaded", path=path, cut=cut, step=job_step, directory=tmp_path
    ):
        assert worst_relative_error(second.weights, want.weights) > 10 * ROUNDING["float32"]


def test_a_step_that_is_aborted_leaves_the_next_one_as_it_would_have_been(
    megatron_world: MegatronWorld, models: Models, step: Step
) -> None:
    cut = Cut(data=2, updates=SHARDED, dtype="float32", optimizer=OPTIONS)
    for aborted, undisturbed in megatron_world.run(
        2, "aborted", path=models("qwen3"), cut=cut, step=JobStep.of(step, TOKENS)
    ):
        assert aborted.result.grad_norm == undisturbed.result.grad_norm
        assert all(
            (aborted.weights[name] == undisturbed.weights[name]).all() for name in aborted.weights
        )
