"""Failures at every call site of a step over several ranks leave it as before its begin."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity_cases import SEQUENCES as LOSS
from parity_cases import Cut, Step, worst_relative_error
from world import WorkerFailed, World

Models = Callable[[str], Path]


@pytest.mark.parametrize("site", ["read", "forward", "loss", "backward", "finish"])
def test_after_a_failure_and_an_abort_the_step_is_taken_as_if_nothing_had_been(
    world: World, models: Models, step: Step, site: str
) -> None:
    answers = world.run(
        2,
        "torch_jobs:failed_then_retried",
        path=models("qwen3"),
        cut=Cut(),
        step=step,
        site=site,
        on=(0, 1),
    )
    for raised, left, retried, undisturbed in answers:
        assert (raised, left) == ("Injected", [])
        assert retried.digest == undisturbed.digest
        assert retried.result.metrics == undisturbed.result.metrics


def test_a_rank_that_cannot_take_part_tells_the_others_before_they_wait(
    world: World, models: Models, step: Step
) -> None:
    answers = world.run(
        2,
        "torch_jobs:failed_then_retried",
        path=models("qwen3"),
        cut=Cut(),
        step=step,
        site="read",
        on=(1,),
    )
    assert [raised for raised, *_ in answers] == ["PeerFailed", "Injected"]
    for _, left, retried, undisturbed in answers:
        assert left == []
        assert retried.digest == undisturbed.digest


def test_a_rank_without_room_for_a_pass_cuts_its_rows_smaller_and_the_step_is_the_same(
    world: World, models: Models, step: Step
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step}
    answers = world.run(2, "torch_jobs:short_of_memory", most_tokens=64, **given)
    assert [raised for raised, *_ in answers] == ["", ""]
    assert [most < 64 for _, most, *_ in answers] == [False, True]
    for *_, got, want in answers:
        assert worst_relative_error(got.weights, want.weights) < 1e-9


def test_a_rank_that_runs_out_of_memory_tells_the_others_and_the_step_is_taken_again(
    world: World, models: Models, step: Step
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step}
    answers = world.run(2, "torch_jobs:short_of_memory", most_tokens=1, **given)
    assert [raised for raised, *_ in answers] == ["PeerFailed", "OutOfMemoryError"]
    for *_, got, want in answers:
        assert worst_relative_error(got.weights, want.weights) < 1e-9


def test_logprobs_that_fail_in_the_midst_of_a_step_cost_it_nothing(
    world: World, models: Models, step: Step
) -> None:
    given = {"path": models("qwen3"), "cut": Cut(), "step": step}
    for disturbed, undisturbed in world.run(2, "torch_jobs:logprobs_that_fail", **given):
        assert disturbed == undisturbed


def test_a_step_that_moves_the_weights_of_no_rank_is_refused_by_name(
    world: World, models: Models, step: Step
) -> None:
    cut = Cut(dtype="float32", optimizer={"learning_rate": 1e-30})
    with pytest.raises(WorkerFailed, match="WeightsUnmoved: step 1 had learning rate"):
        world.run(2, "torch_jobs:single", path=models("qwen3"), cut=cut, step=step, loss=LOSS)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_state_goes_from_one_rank_to_two_and_back(
    world: World, models: Models, step: Step, tmp_path: Path, dtype: str
) -> None:
    """The same numbers as a run that never changed: to rounding, and bit for bit where ranks stay."""
    given = {"path": models("qwen3"), "cut": Cut(dtype=dtype, optimizer=SCHEDULE), "step": step}
    places = [tmp_path / name for name in ("one", "two", "again")]
    for place in places:
        place.mkdir()

    def run(ranks: int, count: int, load: Path | None = None, save: Path | None = None):  # noqa: ANN202
        job = "torch_jobs:steps_from"
        answers = world.run(ranks, job, count=count, load=load, save=save, **given)
        assert all(each == answers[0] for each in answers)
        return answers[0]

    undisturbed, _ = run(1, 5)
    _, saved = run(1, 2, save=places[0])
    assert run(2, 0, load=places[0])[1] == saved
    middle, moved = run(2, 2, load=places[0], save=places[1])
    assert run(1, 0, load=places[1])[1] == moved
    assert run(2, 0, load=places[1], save=places[2])[1] == moved
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "counters.json"):
        assert (places[1] / name).read_bytes() == (places[2] / name).read_bytes()
    last, _ = run(1, 1, load=places[1])
    bound = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 3e-2}[dtype]
    for got, want in zip([*middle, *last], undisturbed[2:], strict=True):
        assert got == pytest.approx(want, rel=bound)
    assert run(2, 1, load=places[1]) == run(2, 1, load=places[2])


SCHEDULE = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}


def test_several_ranks_export_the_very_files_that_one_does(
    world: World, models: Models, tmp_path: Path
) -> None:
    for number, (model, dtype, file_bytes, count) in enumerate(
        (
            ("qwen3", "bfloat16", 2**30, 1),
            ("llama-tied", "float32", 2**30, 1),
            ("qwen3", "float32", 20_000, 5),
        )
    ):
        given = {"path": models(model), "cut": Cut(dtype=dtype), "file_bytes": file_bytes}
        targets = {ranks: tmp_path / f"{number}-{ranks}" for ranks in (1, 2)}
        answers = [
            answer
            for ranks, target in targets.items()
            for answer in world.run(ranks, "torch_jobs:exported", target=target, **given)
        ]
        assert all(each == answers[0] for each in answers)
        names = [sorted(file.name for file in target.iterdir()) for target in targets.values()]
        assert names[0] == names[1]
        assert len([name for name in names[0] if name.endswith(".safetensors")]) >= count
        for name in names[0]:
            assert (targets[1] / name).read_bytes() == (targets[2] / name).read_bytes()


def test_several_ranks_publish_the_very_bytes_that_one_does(world: World, models: Models) -> None:
    given = {"path": models("qwen3"), "cut": Cut(dtype="float32"), "chunk_bytes": 20_000}
    (alone,) = world.run(1, "torch_jobs:published", **given)
    first, second = world.run(2, "torch_jobs:published", **given)
    assert len(alone) > 4
    assert first == alone
    assert second == []


def test_ranks_in_16_bits_train_as_one_does(world: World, models: Models, step: Step) -> None:
    """float32 masters are held in shards; what is computed and published has 16 bits."""
    given = {
        "path": models("qwen3"),
        "cut": Cut(dtype="bfloat16"),
        "step": step,
        "loss": LOSS,
        "chunks": (1, 2),
    }
    (one,) = world.run(1, "torch_jobs:split", **given)
    two = world.run(2, "torch_jobs:split", **given)
    for each in two:
        assert each.result.loss == pytest.approx(one.result.loss, rel=1e-2)
        assert each.result.grad_norm == pytest.approx(one.result.grad_norm, rel=3e-2)
        assert worst_relative_error(each.weights, one.weights) < 1e-2


def test_gradients_of_ranks_in_16_bits_are_added_up_in_float32(
    world: World, models: Models, step: Step
) -> None:
    """Each rank's part has 16 bits; a sum that had been rounded to them would have no more."""
    cut = Cut(dtype="bfloat16", max_tokens=100_000)  # one microbatch on each rank
    given = {"path": models("qwen3"), "cut": cut, "step": step, "loss": LOSS, "chunks": (1,)}
    for each in world.run(2, "torch_jobs:split", **given):
        sums = torch.cat([torch.from_numpy(g).ravel() for g in each.gradients[1].values()])
        assert (sums.bfloat16().double() != sums).float().mean() > 0.2
