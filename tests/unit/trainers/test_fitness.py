"""A group that cannot be trained is found by its place, before anything is computed of any."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.trainers.errors import UnfitColumns
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.random_groups import Group, make_group

MakeTrainer = Callable[..., TorchTrainer]
BAD = 1  # place of the group that is spoiled
ADVANTAGES = [(1.0, -1.0)] * 3


def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    return [make_group(rng, 4, [5, 6]) for _ in ADVANTAGES]


def shorter(name: str) -> Callable[[Group], dict[str, Any]]:
    return lambda group: group | {name: group[name][:-1]}


def without(name: str) -> Callable[[Group], dict[str, Any]]:
    return lambda group: {key: column for key, column in group.items() if key != name}


def spoiled(name: str, place: int, value: float) -> Callable[[Group], dict[str, Any]]:
    def spoil(group: Group) -> dict[str, Any]:
        column = group[name].copy()
        column[place] = value
        return group | {name: column}

    return spoil


SPOILERS = {
    "tokens fewer than offsets say": ("response_offsets", shorter("response_ids")),
    "mask too short": ("loss_mask", shorter("loss_mask")),
    "logprobs too short": ("generation_logprobs", shorter("generation_logprobs")),
    "versions too short": ("weight_versions", shorter("weight_versions")),
    "no logprobs": ("generation_logprobs", without("generation_logprobs")),
    "no offsets": ("response_offsets", without("response_offsets")),
    "no prompt": ("prompt_ids", lambda group: group | {"prompt_ids": group["prompt_ids"][:0]}),
    "an empty sample": ("response_offsets", spoiled("response_offsets", 1, 11)),
    "falling offsets": ("response_offsets", spoiled("response_offsets", 1, 12)),
    "a NaN": ("generation_logprobs", spoiled("generation_logprobs", 3, np.nan)),
    "an infinity": ("generation_logprobs", spoiled("generation_logprobs", -1, -np.inf)),
    "a response token of another vocabulary": ("response_ids", spoiled("response_ids", 2, 64)),
    "a prompt token of another vocabulary": ("prompt_ids", spoiled("prompt_ids", 0, 64)),
    "a negative token": ("response_ids", spoiled("response_ids", -1, -1)),
}


@pytest.mark.parametrize(("column", "spoil"), SPOILERS.values(), ids=SPOILERS)
def test_a_group_that_cannot_be_trained_is_named_and_the_others_can_be(
    trainer_of: MakeTrainer, column: str, spoil: Callable[[Group], dict[str, Any]]
) -> None:
    clean, trainer = trainer_of(), trainer_of()
    good = groups()
    others = [good[0], good[2]]
    clean.train(build_chunk(others), ADVANTAGES[:2], LossSpec())
    trainer.begin_train_step(StepKey(1, 1, 0), LossSpec())
    with pytest.raises(UnfitColumns, match=column) as unfit:
        trainer.train_microbatch(
            StepKey(1, 1, 1), build_chunk([good[0], spoil(good[BAD]), good[2]]), ADVANTAGES
        )
    assert (unfit.value.place, unfit.value.column) == (BAD, column)
    trainer.abort_train_step(StepKey(1, 1, 0))
    trainer.begin_train_step(StepKey(1, 2, 0), LossSpec())
    trainer.train_microbatch(StepKey(1, 2, 1), build_chunk(others), ADVANTAGES[:2])
    assert trainer.finish_train_step(StepKey(1, 2, 2)).applied
    assert trainer.weights_digest() == clean.weights_digest()


def test_what_is_not_trained_may_be_anything(trainer_of: MakeTrainer) -> None:
    good, dirty = groups(), groups()
    for each in (good, dirty):
        each[BAD]["loss_mask"][3] = False
    dirty[BAD]["generation_logprobs"][3] = np.nan
    results = [
        trainer_of().train(build_chunk(each), ADVANTAGES, LossSpec()) for each in (good, dirty)
    ]
    assert results[0].applied
    assert results[0].loss == results[1].loss


def test_logprobs_are_not_computed_of_a_group_without_tokens(trainer_of: MakeTrainer) -> None:
    bad = [*groups()[:1], shorter("response_ids")(groups()[BAD])]
    with pytest.raises(UnfitColumns, match="response_offsets") as unfit:
        trainer_of().prepare_logprobs(
            build_chunk(bad), policy=True, reference=False, temperature=1.0
        )
    assert unfit.value.place == BAD


def test_it_crosses_processes_with_all_it_says() -> None:
    unfit = UnfitColumns(BAD, "loss_mask", "3 values", "4: one per response token").on(7)
    again = pickle.loads(pickle.dumps(unfit))  # noqa: S301 -- our own
    assert (again.place, again.rank, str(again)) == (BAD, 7, str(unfit))
