"""Tensor-parallel ranks of the torch trainer, and what does not go with them."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.limits import trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.plugins.planning.sync_plan import sender_grid
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.weight_sync.grid import ModelGrid
from tests.support.recipes import make_config


def config(trainer: dict[str, Any], **sections: Any) -> RunConfig:
    return make_config(**sections, trainer=trainer)


def refused(trainer: dict[str, Any], **sections: Any) -> list[str]:
    found = clashes(config(trainer, **sections))
    return [each.message for each in found if "trainer.tensor_parallel" in each.keys]


def test_a_replica_has_as_many_ranks_as_divide_its_matrices() -> None:
    given = config({"data_parallel": 3, "tensor_parallel": 2})
    assert trainer_ranks(given) == 6
    assert Replicas.of(given.trainer) == Replicas(data=3, tensor=2)
    assert sender_grid(given) == ModelGrid(shards=3, tensor=2, own_plan=1)
    assert refused({"data_parallel": 3, "tensor_parallel": 2}) == []
    assert refused({"tensor_parallel": 2, "lora": {}}) == []


@pytest.mark.parametrize(
    ("key", "trainer", "sections"),
    [
        ("trainer.moe", {"moe": {"load_balancing_coef": 0.1}}, {}),
        ("environment.images", {}, {"environment": {"name": "digits", "images": {}}}),
    ],
)
def test_what_is_not_divided_is_refused_by_name(
    key: str, trainer: dict[str, Any], sections: dict[str, Any]
) -> None:
    (message,) = refused({"tensor_parallel": 2, **trainer}, **sections)
    assert (
        f"trainer.tensor_parallel=2 of trainer.backend=torch cannot be combined with {key}"
        in message
    )
    assert refused({"tensor_parallel": 1, **trainer}, **sections) == []


def test_pictures_go_with_it_where_the_vision_tower_has_ranks_of_its_own() -> None:
    pictures: dict[str, Any] = {"environment": {"name": "digits", "images": {}}}
    assert refused({"tensor_parallel": 2, "encoder": {}}, **pictures) == []
    (found,) = clashes(config({"tensor_parallel": 2}, **pictures))
    assert "trainer.encoder.data_parallel=1" in found.hint
    followed = {"tensor_parallel": 2, "encoder": {"data_parallel": 1}}
    assert list(clashes(config(followed, **pictures))) == []


def test_encoder_ranks_are_no_advice_where_they_would_be_refused_in_turn() -> None:
    pictures: dict[str, Any] = {"environment": {"name": "digits", "images": {}}}
    found = clashes(config({"tensor_parallel": 2, "lora": {}}, **pictures))
    (hint,) = [each.hint for each in found if "environment.images" in each.keys]
    assert hint == "Set trainer.tensor_parallel to 1."
