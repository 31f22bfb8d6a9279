"""The torch trainer over gloo worlds of 1, 2 and 4 ranks: the same step, however it is cut."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parity_cases import (
    BOUND,
    CHUNKS,
    LOSSES,
    OWN,
    RECOMPUTE,
    ROWS,
    SEQUENCES,
    SEVERAL,
    TOKENS,
    TORCH_CASES,
    TORCH_FAMILIES,
    Arrays,
    Cut,
    Outcome,
    Step,
    moved,
    worst_relative_error,
)
from parity_table import ParityTable
from unused_jobs import UNUSED
from world import World

from offbeat.weight_sync import canary

Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def before(world: World, models: Models) -> Arrays:
    (answer,) = world.run(1, "torch_jobs:initial", path=models("qwen3"), cut=Cut())
    return answer[0]


def agree(outcomes: list[Outcome]) -> None:
    """What is said of the whole step is the same on all ranks, and so are the weights."""
    assert len({each.digest for each in outcomes}) == 1
    first, *others = [each.result for each in outcomes]
    for other in others:
        assert (other.loss, other.grad_norm, other.metrics) == (
            first.loss,
            first.grad_norm,
            first.metrics,
        )


def same_numbers(got: Outcome, want: Outcome) -> None:
    assert got.result.applied and want.result.applied
    assert (got.result.tokens, got.result.sequences) == (want.result.tokens, want.result.sequences)
    assert got.result.loss == pytest.approx(want.result.loss, rel=BOUND)
    assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
    assert got.result.learning_rate == want.result.learning_rate
    assert got.result.metrics.keys() == want.result.metrics.keys()
    assert got.result.metrics == pytest.approx(want.result.metrics, rel=BOUND)


@pytest.mark.parametrize(("ranks", "rows", "loss"), TORCH_CASES)
def test_a_step_is_the_single_shot_one_however_it_is_cut(  # noqa: PLR0917 -- fixtures, by name
    world: World,
    models: Models,
    step: Step,
    want: Callable[..., Outcome],
    before: Arrays,
    parity_table: ParityTable,
    ranks: int,
    rows: str,
    loss: str,
) -> None:
    single = want(LOSSES[loss])
    outcomes: list[Outcome] = world.run(
        ranks,
        "torch_jobs:split",
        path=models("qwen3"),
        cut=Cut(**ROWS[rows]),
        step=step,
        loss=LOSSES[loss],
        chunks=CHUNKS,
    )
    agree(outcomes)
    for each in outcomes:
        for chunks in CHUNKS:
            error = worst_relative_error(each.gradients[chunks], single.gradients[1])
            parity_table.add("torch", f"dp{ranks}", loss, chunks, error, rows)
            assert error <= BOUND
        same_numbers(each, single)
        assert (
            worst_relative_error(moved(each.weights, before), moved(single.weights, before))
            <= 10 * BOUND
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_train_in_one_call_is_the_same_over_ranks(
    world: World, models: Models, step: Step, want: Callable[..., Outcome], ranks: int
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step, "loss": TOKENS}
    outcomes = world.run(ranks, "torch_jobs:single", **given)
    agree(outcomes)
    for each in outcomes:
        same_numbers(each, want(TOKENS))


def test_several_optimizer_steps_are_the_same_over_ranks(
    world: World, models: Models, step: Step, before: Arrays
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step, "loss": SEVERAL}
    (want,) = world.run(1, "torch_jobs:single", **given)
    outcomes = world.run(2, "torch_jobs:single", **given)
    agree(outcomes)
    for each in outcomes:
        same_numbers(each, want)
        error = worst_relative_error(moved(each.weights, before), moved(want.weights, before))
        assert error <= 10 * BOUND


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_the_user_is_the_built_in_one_through_chunks_and_ranks(
    world: World, models: Models, step: Step, want: Callable[..., Outcome], ranks: int
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step, "loss": OWN, "chunks": CHUNKS}
    outcomes: list[Outcome] = world.run(ranks, "torch_jobs:split", **given)
    agree(outcomes)
    single = want(TOKENS)
    for each in outcomes:
        for chunks in CHUNKS:
            assert worst_relative_error(each.gradients[chunks], single.gradients[1]) <= BOUND
        assert each.result.loss == pytest.approx(single.result.loss, rel=BOUND)
        shown, ratio = each.result.metrics["loss/ratio"], single.result.metrics["train/ratio_mean"]
        assert shown == pytest.approx(ratio, rel=BOUND)


@pytest.mark.parametrize("layout", TORCH_FAMILIES)
def test_tied_embeddings_and_experts_have_one_gradient_over_two_ranks(
    world: World,
    models: Models,
    step: Step,
    want: Callable[..., Outcome],
    parity_table: ParityTable,
    layout: str,
) -> None:
    model = TORCH_FAMILIES[layout]
    single = want(TOKENS, model)
    outcomes = world.run(
        2,
        "torch_jobs:split",
        path=models(model),
        cut=Cut(),
        step=step,
        loss=TOKENS,
        chunks=CHUNKS,
    )
    agree(outcomes)
    for each in outcomes:
        for chunks in CHUNKS:
            error = worst_relative_error(each.gradients[chunks], single.gradients[1])
            parity_table.add("torch", layout, "tokens", chunks, error)
            assert error <= BOUND
        same_numbers(each, single)


@pytest.mark.parametrize("layout", RECOMPUTE)
@pytest.mark.parametrize("rows", ROWS)
def test_layers_that_are_computed_again_give_the_same_gradient_to_the_last_bit(
    world: World,
    models: Models,
    step: Step,
    want: Callable[..., Outcome],
    parity_table: ParityTable,
    layout: str,
    rows: str,
) -> None:
    given = {"path": models("qwen3"), "step": step, "loss": TOKENS, "chunks": CHUNKS}
    kept, recomputed = (
        world.run(
            RECOMPUTE[layout],
            "torch_jobs:split",
            cut=Cut(**ROWS[rows], recompute=recompute),
            **given,
        )
        for recompute in (False, True)
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert one.digest == other.digest
        assert one.result.metrics == other.result.metrics
        for chunks in CHUNKS:
            for name, gradient in one.gradients[chunks].items():
                assert (gradient == other.gradients[chunks][name]).all(), (chunks, name)
            error = worst_relative_error(other.gradients[chunks], want(TOKENS).gradients[1])
            parity_table.add("torch", layout, "tokens", chunks, error, rows)
            assert error <= BOUND


def test_the_whole_gradient_is_clipped_not_each_ranks_part(
    world: World, models: Models, step: Step, want: Callable[..., Outcome], before: Arrays
) -> None:
    cut = Cut(optimizer={"learning_rate": 1e-2, "eps": 1.0, "max_grad_norm": 0.5})
    single = want(SEQUENCES, "qwen3", cut)
    assert single.result.grad_norm > 0.5
    outcomes = world.run(
        2,
        "torch_jobs:split",
        path=models("qwen3"),
        cut=cut,
        step=step,
        loss=SEQUENCES,
        chunks=(2,),
    )
    for each in outcomes:
        same_numbers(each, single)
        assert (
            worst_relative_error(moved(each.weights, before), moved(single.weights, before))
            <= 10 * BOUND
        )


def test_a_rank_without_a_group_computes_along_and_counts_nothing(
    world: World, models: Models, step: Step
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step}
    replies = world.run(4, "torch_jobs:chunk_of_one_group", **given)
    (alone,) = world.run(1, "torch_jobs:chunk_of_one_group", **given)
    assert replies[0] == alone
    assert replies[1:] == [(0, 0, 0)] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_next_token_logprobs_are_those_of_one_rank_and_cost_an_open_step_nothing(
    world: World, models: Models, step: Step, dtype: str
) -> None:
    given = {
        "path": models("qwen3"),
        "cut": Cut(dtype=dtype),
        "step": step,
        "prompts": canary.prompts(63),
    }
    ((alone, *_),) = world.run(1, "torch_jobs:top_logprobs", **given)
    for (tokens, logprobs), disturbed, undisturbed in world.run(
        2, "torch_jobs:top_logprobs", **given
    ):
        assert tokens == alone[0]
        np.testing.assert_allclose(logprobs, alone[1], atol=1e-5)
        assert disturbed == undisturbed


@pytest.mark.parametrize(("model", "tensor"), [("qwen3", 1), ("qwen3", 2), ("moe", 1)])
def test_logprobs_of_quantized_matrices_are_those_of_one_rank_wherever_blocks_are_cut(
    world: World, models: Models, model: str, tensor: int
) -> None:
    given = {"path": models(model), "prompts": canary.prompts(63)}
    ((alone, plain, stays),) = world.run(1, "torch_jobs:quantized_logprobs", cut=Cut(), **given)
    assert stays
    assert np.abs(np.subtract(alone[1], plain[1])).max() > 1e-3, "rounding is seen"
    for found, _, stays in world.run(
        2, "torch_jobs:quantized_logprobs", cut=Cut(tensor=tensor), **given
    ):
        assert stays
        assert found[0] == alone[0]
        np.testing.assert_allclose(found[1], alone[1], atol=1e-5)


def test_logprobs_are_each_groups_own_and_reference_and_teacher_stay(
    world: World, models: Models, step: Step
) -> None:
    given = {
        "path": models("qwen3"),
        "cut": Cut(),
        "step": step,
        "temperature": 0.7,
        "teacher": models("llama-tied"),
    }
    (alone,) = world.run(1, "torch_jobs:logprobs", **given)
    shares = world.run(2, "torch_jobs:logprobs", **given)
    assert sorted([*shares[0], *shares[1]]) == sorted(alone)
    for share in shares:
        for prompt_index, columns in share.items():
            assert (
                worst_relative_error(columns, alone[prompt_index]) < 1e-6
            )  # they travel in float32
            for name in ("reference_logprobs", "teacher_logprobs"):
                assert (columns[f"before/{name}"] == columns[f"after/{name}"]).all()
            teacher, reference = (columns[f"before/{n}_logprobs"] for n in ("teacher", "reference"))
            assert (teacher != reference).any()
            name = "policy_logprobs"
            assert (columns[f"before/{name}"] != columns[f"after/{name}"]).any()


# --- bugs of others -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        ("Averaged", "gradients"),
        ("ReducedTwice", "gradients"),
        ("Unsharded", "gradients"),
        ("OwnCounts", "grad_norm"),
        ("OwnMetrics", "metrics"),
        ("LateRate", "learning_rate"),
    ],
)
def test_a_bug_that_others_had_is_seen(
    world: World, models: Models, step: Step, bug: str, what: str
) -> None:
    """Each is planted alone, on two ranks, and shows where it should."""
    cut = Cut(
        optimizer={
            "learning_rate": 1e-2,
            "schedule": "linear",
            "eps": 1.0,
            "max_grad_norm": None,
        }
    )
    given = {"path": models("qwen3"), "cut": cut, "step": step, "loss": TOKENS, "chunks": (2,)}
    (right,) = world.run(1, "torch_jobs:split", **given)
    wrong: list[Outcome] = world.run(2, "torch_jobs:split", kind=bug, **given)
    seen = {
        "gradients": max(
            worst_relative_error(each.gradients[2], right.gradients[2]) for each in wrong
        ),
        "grad_norm": max(off(each.result.grad_norm, right.result.grad_norm) for each in wrong),
        "learning_rate": max(
            off(each.result.learning_rate, right.result.learning_rate) for each in wrong
        ),
        "metrics": max(
            off(each.result.metrics[name], value)
            for each in wrong
            for name, value in right.result.metrics.items()
        ),
    }
    assert seen[what] > 1e-3


def off(got: float, want: float) -> float:
    return abs(got - want) / abs(want)


def test_a_weight_that_some_ranks_do_not_use_gets_the_gradient_of_the_others(
    world: World, models: Models, step: Step
) -> None:
    path, cut = models("qwen3"), Cut()
    got = world.run(2, "unused_jobs:fed", path=path, cut=cut, step=step)
    for user, unused in enumerate(reversed(UNUSED)):
        own, gradients = got[user]
        alone = world.run(1, "unused_jobs:fed", path=path, cut=cut, step=step, prompt_indices=own)
        name = f"{unused}.weight"
        want = alone[0][1]
        assert worst_relative_error({name: gradients[name]}, {name: want[name]}) <= BOUND


def test_ranks_without_rows_compute_along_on_a_token_at_which_the_model_has_a_gradient(
    world: World, models: Models, step: Step
) -> None:
    path, cut = models("qwen3"), Cut()
    [alone] = world.run(1, "padding_jobs:one_group", path=path, cut=cut, step=step)
    for got in world.run(2, "padding_jobs:one_group", path=path, cut=cut, step=step):
        assert worst_relative_error(got, alone) <= BOUND
