"""Sizes of the fleet that cannot work."""

import pytest

from offbeat.config.crosschecks import MOST_TRAINER_RANKS, clashes
from offbeat.config.run import RunConfig


def found(**sections: object) -> list[str]:
    recipe = {"steps": 1, "model": {"path": "none"}, **sections}
    return [f"{clash.message}. {clash.hint}" for clash in clashes(RunConfig.model_validate(recipe))]


def test_a_run_that_requires_more_engines_than_it_has_is_refused() -> None:
    assert found(generator={"engines": 2, "min_engines": 3})[0] == (
        "generator.min_engines=3 is more than generator.engines=2: the run would start with fewer "
        "engines than it needs to continue. Set generator.min_engines to 2 or less, or "
        "generator.engines to 3 or more."
    )


@pytest.mark.plugins
def test_more_trainer_ranks_than_any_machine_has_are_refused_at_once() -> None:
    encoder = {"data_parallel": 1, "tensor_parallel": 10**12}
    assert found(trainer={"backend": "torch", "encoder": encoder})[0] == (
        "the sizes of trainer make 1000000000001 trainer ranks, 1000000000000 of them of "
        f"trainer.encoder, and at most {MOST_TRAINER_RANKS} are possible. Lower trainer.data_parallel "
        "or another size of trainer or trainer.encoder."
    )


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            {"gpus": 0.5, "data_parallel": 4},
            (
                "trainer.gpus=0.5 may put two of the 4 trainer ranks on one GPU, but NCCL needs a separate "
                "GPU for each rank. Set trainer.gpus to 1, or use one trainer rank."
            ),
        ),
        (
            {"gpus": 1, "encoder": {"gpus": 0.25}},
            "trainer.encoder.gpus=0.25 may put two of the 2 trainer ranks on one GPU",
        ),
    ],
)
def test_several_trainer_ranks_may_not_share_a_gpu(trainer: dict[str, object], said: str) -> None:
    refused = found(trainer={"backend": "torch", "device": "cuda", **trainer})
    assert any(each.startswith(said) for each in refused)


def test_one_trainer_rank_may_have_a_part_of_a_gpu() -> None:
    refused = found(trainer={"backend": "torch", "device": "cuda", "gpus": 0.5})
    assert not any("NCCL" in each for each in refused)


@pytest.mark.parametrize(("more", "is_refused"), [(0, False), (1, True)])
def test_the_bound_of_trainer_ranks_is_the_last_number_that_is_taken(
    more: int, is_refused: bool
) -> None:
    refused = found(trainer={"backend": "torch", "data_parallel": MOST_TRAINER_RANKS + more})
    assert any("are possible" in each for each in refused) == is_refused
