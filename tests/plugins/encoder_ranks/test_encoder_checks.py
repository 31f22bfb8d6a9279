"""Encoder ranks fit the language ranks, and what does not go with them is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.config.crosschecks import clashes
from offbeat.config.limits import trainer_ranks, trainer_resources
from offbeat.config.run import RunConfig
from offbeat.plugins.planning.sync_plan import sender_grid
from offbeat.trainers.ranks.dispatch import Replicas
from tests.support.recipes import make_config

IMAGES: dict[str, Any] = {"environment": {"name": "digits", "images": {}}}


def config(trainer: dict[str, Any], **sections: Any) -> RunConfig:
    return make_config(**{**IMAGES, **sections}, trainer=trainer)


def refused(
    trainer: dict[str, Any], *, dry_run: bool = False, **sections: Any
) -> list[tuple[tuple[str, ...], str, str]]:
    found = clashes(config(trainer, **sections), dry_run=dry_run)
    return [
        (clash.keys, clash.message, clash.hint)
        for clash in found
        if any("trainer.encoder" in key for key in clash.keys)
    ]


def test_encoder_ranks_are_further_ranks_with_resources_of_their_own() -> None:
    given = config(
        {
            "data_parallel": 4,
            "threads": 3,
            "cpus": 2,
            "encoder": {"data_parallel": 2, "threads": 5, "cpus": 1},
        }
    )
    assert trainer_ranks(given) == 6
    resources = [(each.cpus, each.gpus, each.threads) for each in trainer_resources(given)]
    assert resources == [(2, 0, 3)] * 4 + [(1, 0, 5)] * 2
    assert refused({"data_parallel": 4, "encoder": {"data_parallel": 2}}) == []


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_each_encoder_becomes_as_many_ranks_as_divide_its_matrices(backend: str) -> None:
    encoder = {"data_parallel": 2, "tensor_parallel": 2, "cpus": 1}
    trainer = {"data_parallel": 2, "tensor_parallel": 2, "cpus": 2, "encoder": encoder}
    given = config({"backend": backend, **trainer})
    assert trainer_ranks(given) == 8
    assert [each.cpus for each in trainer_resources(given)] == [2] * 4 + [1] * 4
    replicas = Replicas.of(given.trainer)
    assert replicas.ranks == 8
    assert [replicas.list_shares(rank) for rank in range(4, 8)] == [(0,), (0,), (1,), (1,)]
    assert list(clashes(given)) == []
    senders = sender_grid(given)
    assert (senders.encoders, senders.encoder_tensor, senders.ranks) == (2, 2, 8)


def test_an_encoder_rank_reserves_what_the_others_do_unless_told() -> None:
    (_, encoder) = trainer_resources(config({"cpus": 2, "encoder": {}}))
    assert (encoder.cpus, encoder.gpus, encoder.threads) == (2, 0, 1)


@pytest.mark.parametrize(
    ("trainer", "sections", "problem", "fix"),
    [
        (
            {"data_parallel": 4, "encoder": {"data_parallel": 3}},
            {},
            "trainer.data_parallel=4 is not divisible by trainer.encoder.data_parallel=3",
            "data_parallel to 1 or another divisor of 4, trainer.data_parallel to 6, or",
        ),
        (
            {"encoder": {}, "optimizer": {"rounding": "stochastic"}},
            {"model": {"path": "tiny", "dtype": "bfloat16"}},
            "cannot be combined with 2 trainer ranks",
            "train on one rank, without trainer.encoder",
        ),
        (
            {"encoder": {}},
            {"environment": {"name": "arithmetic"}},
            "environment.images is not set",
            "Leave trainer.encoder out",
        ),
        (
            {"encoder": {}, "lora": {}},
            {},
            "cannot be combined with trainer.lora",
            "one of them out",
        ),
        (
            {"encoder": {"gpus": 1}},
            {},
            "trainer.encoder.gpus=1 with trainer.gpus=0",
            "Leave trainer.encoder.gpus out",
        ),
    ],
    ids=["lanes", "rounding", "no pictures", "adapters", "devices"],
)
def test_what_does_not_go_with_encoder_ranks_is_refused_by_name(
    trainer: dict[str, Any], sections: dict[str, Any], problem: str, fix: str
) -> None:
    (found,) = refused(trainer, **sections)
    assert problem in found[1]
    assert fix in found[2]
    of_real_runs = "trainer.gpus" in problem or "trainer ranks" in problem
    assert refused(trainer, dry_run=True, **sections) == ([] if of_real_runs else [found])


def test_the_stub_does_not_know_the_key() -> None:
    with pytest.raises(ValidationError, match=r"trainer\.\w+\.encoder"):
        config({"backend": "stub", "encoder": {}})


def test_encoder_ranks_stand_behind_all_ranks_of_the_megatron_trainer() -> None:
    given = config(
        {
            "backend": "megatron",
            "data_parallel": 2,
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "cpus": 2,
            "encoder": {"data_parallel": 2, "cpus": 1},
        }
    )
    assert trainer_ranks(given) == 10
    assert [each.cpus for each in trainer_resources(given)] == [2] * 8 + [1] * 2
    assert list(clashes(given)) == []
    replicas = Replicas.of(given.trainer)
    assert replicas.ranks == 10
    assert [replicas.list_shares(rank) for rank in (8, 9)] == [(0,), (1,)]


@pytest.mark.parametrize(
    "key", ["context_parallel", "expert_parallel", "expert_tensor_parallel", "data_parallel"]
)
def test_encoder_ranks_go_with_every_axis_of_the_megatron_trainer(key: str) -> None:
    trainer: dict[str, Any] = {"backend": "megatron", "encoder": {}, "tensor_parallel": 2, key: 2}
    assert refused(trainer) == []
