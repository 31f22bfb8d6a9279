"""A masked sample in a trained group: the step is the one of the group without it."""

from typing import Any

import numpy as np
import pytest
import torch

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.generator import StubConfig
from offbeat.config.sections.loss import ClippedPgLossConfig, GspoLossConfig
from offbeat.fakes.trainer import StubTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.random_groups import Group, make_group
from tests.support.split_steps import MakeTrainer

LOSSES = {
    "tokens": LossSpec(),
    "sequences": LossSpec(ClippedPgLossConfig(normalize="sequences")),
    "constant": LossSpec(ClippedPgLossConfig(normalize="constant", constant_tokens=9)),
    "step deviation": LossSpec(ClippedPgLossConfig(step_std=True)),
    "sequence ratio": LossSpec(GspoLossConfig(normalize="sequences")),
}


def masked(group: Group, sample: int) -> Group:
    """The group with this sample out of the loss."""
    mask, offsets = group["loss_mask"].copy(), group["response_offsets"]
    mask[offsets[sample] : offsets[sample + 1]] = False
    return {**group, "loss_mask": mask}


def without(group: Group, sample: int) -> Group:
    """The group as if this sample had not been drawn."""
    offsets = group["response_offsets"]
    own = np.zeros(offsets[-1], bool)
    own[offsets[sample] : offsets[sample + 1]] = True
    lengths = np.delete(np.diff(offsets), sample)
    rest: dict[str, Any] = {
        name: values[~own] for name, values in group.items() if len(values) == len(own)
    }
    return {**group, **rest, "response_offsets": np.cumsum([0, *lengths]).astype(np.int64)}


def groups() -> list[Group]:
    rng = np.random.default_rng(4)
    return [make_group(rng, 5, lengths) for lengths in ([3, 7, 4], [6, 2, 9])]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_masked_sample_leaves_gradient_and_divisor_as_without_it(
    trainer_of: MakeTrainer, qwen3: Any, loss: LossSpec
) -> None:
    whole, advantages = groups(), [(0.5, -0.5), (0.3, 0.2, -0.5)]
    with_masked = trainer_of(qwen3)
    zero_for_it = [(0.5, 0.0, -0.5), advantages[1]]
    got = with_masked.train(build_chunk([masked(whole[0], 1), whole[1]]), zero_for_it, loss)
    plain = trainer_of(qwen3)
    want = plain.train(build_chunk([without(whole[0], 1), whole[1]]), advantages, loss)
    assert (got.tokens, got.sequences) == (want.tokens, want.sequences)
    assert got.loss == pytest.approx(want.loss, rel=1e-9)
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-9)
    weights = dict(plain.iterate_weights())
    for name, each in with_masked.iterate_weights():
        torch.testing.assert_close(each, weights[name], rtol=1e-9, atol=1e-12)


def test_the_stub_counts_a_masked_sample_neither_by_tokens_nor_as_a_sequence() -> None:
    (group, _), loss = groups(), LossSpec()
    stub = StubTrainer(StubConfig(step_s=0.0), groups_per_step=1)
    got = stub.train(build_chunk([masked(group, 1)]), [(0.5, 0.0, -0.5)], loss)
    want = stub.train(build_chunk([without(group, 1)]), [(0.5, -0.5)], loss)
    assert (got.tokens, got.sequences) == (want.tokens, want.sequences) == (7, 2)
