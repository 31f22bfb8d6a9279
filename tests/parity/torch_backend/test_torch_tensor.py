"""The torch trainer over tensor-parallel ranks: the same step, however matrices are divided."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parity_cases import (
    BOUND,
    CHUNKS,
    SEVERAL,
    TENSOR_MODELS,
    TENSOR_RANKS,
    TOKENS,
    Cut,
    Outcome,
    Step,
    moved,
    worst_relative_error,
)
from parity_table import ParityTable
from world import WorkerFailed, World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.trainers.torch.activation_bytes import largest_rank
from offbeat.weight_sync import canary
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.grid import ModelGrid

Models = Callable[[str], Path]
Want = Callable[..., Outcome]
SCHEDULE = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}


@pytest.mark.parametrize("layout", TENSOR_RANKS)
@pytest.mark.parametrize("model", TENSOR_MODELS)
def test_a_step_over_tensor_ranks_is_that_of_one_rank(
    world: World,
    models: Models,
    step: Step,
    want: Want,
    parity_table: ParityTable,
    layout: str,
    model: str,
) -> None:
    single, ranks = want(TOKENS, model), TENSOR_RANKS[layout]
    given = {"path": models(model), "step": step, "loss": TOKENS, "chunks": CHUNKS}
    outcomes: list[Outcome] = world.run(ranks, "torch_jobs:split", cut=Cut(tensor=2), **given)
    ((start, _),) = world.run(1, "torch_jobs:initial", path=models(model), cut=Cut())
    assert len({each.digest for each in outcomes}) == 1
    for each in outcomes:
        for chunks in CHUNKS:
            error = worst_relative_error(each.gradients[chunks], single.gradients[1])
            parity_table.add("torch", f"{layout}{TENSOR_MODELS[model]}", "tokens", chunks, error)
            assert error <= BOUND
        got, right = each.result, single.result
        assert got.loss == pytest.approx(right.loss, rel=BOUND)
        assert got.grad_norm == pytest.approx(right.grad_norm, rel=BOUND)
        assert got.metrics == pytest.approx(right.metrics, rel=BOUND)
        assert (got.tokens, got.sequences) == (right.tokens, right.sequences)
        error = worst_relative_error(moved(each.weights, start), moved(single.weights, start))
        assert error <= 10 * BOUND


@pytest.mark.parametrize("ranks", [2, 4], ids=["tp2", "tp2 x dp2"])
def test_several_optimizer_steps_over_tensor_ranks_are_those_of_one_rank(
    world: World, models: Models, step: Step, ranks: int
) -> None:
    given = {"path": models("qwen3"), "step": step, "loss": SEVERAL}
    (want,) = world.run(1, "torch_jobs:single", cut=Cut(), **given)
    for got in world.run(ranks, "torch_jobs:single", cut=Cut(tensor=2), **given):
        assert got.result.metrics == pytest.approx(want.result.metrics, rel=BOUND)
        assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
        assert worst_relative_error(got.weights, want.weights) <= BOUND


def test_layers_that_are_computed_again_give_tensor_ranks_the_same_bits(
    world: World, models: Models, step: Step
) -> None:
    given = {"path": models("qwen3"), "step": step, "loss": TOKENS, "chunks": (2,)}
    kept, recomputed = (
        world.run(2, "torch_jobs:split", cut=Cut(tensor=2, recompute=recompute), **given)
        for recompute in (False, True)
    )
    assert {each.digest for each in kept} == {each.digest for each in recomputed}


def test_a_row_of_the_embedding_that_is_not_trained_gets_no_gradient_on_any_rank(
    world: World, models: Models, step: Step, want: Want
) -> None:
    given = {"path": models("llama-padded"), "step": step, "loss": TOKENS, "chunks": (2,)}
    single = want(TOKENS, "llama-padded")
    for each in world.run(2, "torch_jobs:split", cut=Cut(tensor=2), **given):
        assert worst_relative_error(each.gradients[2], single.gradients[1]) <= BOUND
        assert not each.gradients[2]["model.embed_tokens.weight"][40].any()
        assert each.gradients[2]["lm_head.weight"][40].any()


@pytest.mark.parametrize("model", ["qwen3", "qwen3-tied"])
def test_logits_of_some_places_at_a_time_give_tensor_ranks_the_same_gradient(
    world: World, models: Models, step: Step, model: str
) -> None:
    given = {"path": models(model), "step": step}
    job = "tensor_jobs:heads_whole_and_in_chunks"
    ((alone, _),) = world.run(1, job, cut=Cut(), **given)
    for whole, chunked in world.run(2, job, cut=Cut(tensor=2), **given):
        assert worst_relative_error(whole, alone) <= BOUND
        assert worst_relative_error(chunked, alone) <= BOUND


def test_the_most_probable_tokens_of_tensor_ranks_are_those_of_one_rank(
    world: World, models: Models, step: Step
) -> None:
    """In the midst of a step, which they cost nothing."""
    given = {"path": models("qwen3"), "step": step, "prompts": canary.prompts(63)}
    ((alone, *_),) = world.run(1, "torch_jobs:top_logprobs", cut=Cut(), **given)
    for (tokens, logprobs), disturbed, undisturbed in world.run(
        2, "torch_jobs:top_logprobs", cut=Cut(tensor=2), **given
    ):
        assert tokens == alone[0]
        np.testing.assert_allclose(logprobs, alone[1], atol=1e-10)
        assert disturbed == undisturbed


def test_copies_of_a_weight_stay_equal_although_each_rank_rounds_in_its_own_way(
    world: World, models: Models, step: Step
) -> None:
    cut = Cut(tensor=2)
    seen = world.run(2, "tensor_jobs:rounded_otherwise", path=models("qwen3"), cut=cut, step=step)
    assert seen[0] == seen[1]


def test_logprobs_of_tensor_ranks_are_those_of_one_rank_and_the_reference_stays(
    world: World, models: Models, step: Step
) -> None:
    given = {
        "path": models("qwen3"),
        "step": step,
        "temperature": 0.7,
        "teacher": models("llama-tied"),
    }
    (alone,) = world.run(1, "torch_jobs:logprobs", cut=Cut(), **given)
    first, second = world.run(2, "torch_jobs:logprobs", cut=Cut(tensor=2), **given)
    assert first.keys() == second.keys() == alone.keys()
    for prompt_index, columns in first.items():
        # They travel in float32
        assert worst_relative_error(columns, alone[prompt_index]) < 1e-6
        before, after = (columns[f"{when}/reference_logprobs"] for when in ("before", "after"))
        assert (before == after).all()


# --- mistakes, planted ----------------------------------------------------------------------------


def norm_and_tokens(world: World, models: Models, step: Step, kind: str) -> tuple[float, int]:
    given = {"path": models("qwen3"), "step": step, "loss": TOKENS, "chunks": (2,)}
    outcomes = world.run(2, "torch_jobs:split", cut=Cut(tensor=2), kind=kind, **given)
    return outcomes[0].result.grad_norm, outcomes[0].result.tokens


def test_a_norm_that_counts_copies_and_a_step_that_counts_a_replica_twice_are_seen(
    world: World, models: Models, step: Step
) -> None:
    norm, tokens = norm_and_tokens(world, models, step, "Exact")
    assert norm_and_tokens(world, models, step, "CountsCopies")[0] > 1.01 * norm
    assert norm_and_tokens(world, models, step, "CountsReplicaTwice")[1] == 2 * tokens


def test_groups_scattered_over_the_ranks_of_a_replica_are_refused(
    world: World, models: Models, step: Step
) -> None:
    with pytest.raises(
        WorkerFailed, match="ranks 0 and 1 share one replica but read different rows"
    ):
        norm_and_tokens(world, models, step, "Scattered")


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("KeepsPartsOfNorms", r"tensor ranks different gradients of model\.layers\.\d+\."),
        ("KeepsPartsOfHidden", r"tensor ranks different gradients of model\."),
        (
            "KeepsPartsOfTotals",
            r"log-probabilities when it is cut over ranks that are off by",
        ),
    ],
)
def test_ranks_that_forget_to_add_up_what_they_compute_are_refused_at_the_start(
    world: World, models: Models, step: Step, kind: str, problem: str
) -> None:
    with pytest.raises(WorkerFailed, match=problem):
        norm_and_tokens(world, models, step, kind)


@pytest.mark.parametrize("model", ["moe", "dots1", "qwen2-moe"])
def test_models_with_experts_are_refused_by_name(
    world: World, models: Models, step: Step, model: str
) -> None:
    given = {"path": models(model), "step": step, "loss": TOKENS, "chunks": (1,)}
    with pytest.raises(WorkerFailed, match=r"UntrainableModel: .*cannot be divided"):
        world.run(2, "torch_jobs:split", cut=Cut(tensor=2), **given)


# --- states and releases --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("model", "ranks"), [("llama-biased", 4), ("qwen3-tied", 2)])
def test_a_state_goes_from_one_rank_to_tensor_ranks_and_back(
    world: World, models: Models, step: Step, tmp_path: Path, dtype: str, model: str, ranks: int
) -> None:
    places = [tmp_path / name for name in ("one", "tensor")]
    for place in places:
        place.mkdir()

    def run(tensor: int, count: int, load: Path | None = None, save: Path | None = None):  # noqa: ANN202
        # A gradient of 16 bits is 5 % off in any layout: larger steps would go other ways
        rate = {"float64": 1e-2, "bfloat16": 1e-4}[dtype]
        cut = Cut(dtype=dtype, optimizer=SCHEDULE | {"learning_rate": rate}, tensor=tensor)
        given = {"path": models(model), "step": step, "count": count, "load": load, "save": save}
        answers = world.run(ranks if tensor > 1 else 1, "torch_jobs:steps_from", cut=cut, **given)
        assert all(each == answers[0] for each in answers)
        return answers[0]

    undisturbed, _ = run(1, 4)
    _, saved = run(1, 1, save=places[0])
    assert run(2, 0, load=places[0])[1] == saved
    middle, after = run(2, 2, load=places[0], save=places[1])
    assert run(1, 0, load=places[1])[1] == after
    assert run(2, 1, load=places[1]) == run(2, 1, load=places[1])
    last, _ = run(1, 1, load=places[1])
    bound = {"float64": 1e-10, "bfloat16": 3e-2}[dtype]
    for got, right in zip([*middle, *last], undisturbed[1:], strict=True):
        assert got == pytest.approx(right, rel=bound)


def test_tensor_ranks_export_the_very_files_that_one_rank_does(
    world: World, models: Models, tmp_path: Path
) -> None:
    for model, dtype in (("llama-biased", "bfloat16"), ("llama-tied", "float32")):
        answers = list[object]()
        for ranks, tensor in ((1, 1), (4, 2)):
            target = tmp_path / f"{model}-{ranks}"
            cut = Cut(dtype=dtype, tensor=tensor)
            answers += world.run(
                ranks, "torch_jobs:exported", path=models(model), cut=cut, target=target
            )
        assert all(each == answers[0] for each in answers)
        one, four = (tmp_path / f"{model}-{ranks}/model.safetensors" for ranks in (1, 4))
        assert one.read_bytes() == four.read_bytes()


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bfloat16"), (4, "float32")])
def test_sharded_receivers_get_what_a_broadcast_sends_from_tensor_ranks(
    world: World, models: Models, ranks: int, dtype: str
) -> None:
    cut = Cut(dtype=dtype, tensor=2)
    answers = world.run(ranks, "torch_jobs:sent", path=models("llama-biased"), cut=cut)
    assert [same for same, _ in answers] == [True] * ranks


@pytest.mark.parametrize(("model", "ranks"), [("llama-biased", 4), ("qwen3", 2), ("qwen3-tied", 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_ranks_hold_the_regions_that_a_plan_declares_and_the_bytes_that_check_says(
    world: World, models: Models, step: Step, model: str, ranks: int, dtype: str
) -> None:
    path, cut = models(model), Cut(tensor=2, dtype=dtype)
    seen = world.run(ranks, "tensor_jobs:held", path=path, cut=cut, step=step)
    tensors, sizes = model_tensors(path, WirePolicy(), tensor_ranks=2)
    declared = ModelGrid(shards=ranks // 2, tensor=2, own_plan=1)
    for rank, (regions, shapes, _) in enumerate(seen):
        placed = {each.name: placement(each, sizes, declared).at(rank) for each in tensors}
        assert {name: [region] for name, region in regions.items() if region.elements} == {
            name: found for name, found in placed.items() if found
        }
        assert {name: region.shape for name, region in regions.items()} == shapes
    said = largest_rank(
        model_without_memory(path, trust_remote_code=False),
        getattr(torch, dtype),
        data=ranks // 2,
        tensor=2,
    )
    assert said == max((held for *_, held in seen), key=lambda each: each.total)
