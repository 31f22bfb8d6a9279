"""Supervised fine-tuning, from rows to a gradient: what a plain loop over the rows computes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import SftLossConfig
from offbeat.environments.demonstrations import Demonstrations
from offbeat.messages.fences import StepKey
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.environment_fakes import EOS_ID, SAMPLING, CharTokenizer, task
from tests.support.split_steps import MakeTrainer, run_step

SFT = LossSpec(SftLossConfig())
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "completion": "3"},
    {"prompt": "10+20=", "completion": "30"},
    {
        "messages": [
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "+10?"},
            {"role": "assistant", "content": "13"},
        ]
    },
]
# What each row is for a model: text, and whether it is learned. ``\0`` is the end token.
TEXTS = [
    [("1+2=", False), ("3\0", True)],
    [("10+20=", False), ("30\0", True)],
    [("(1+2?)", False), ("3\0", True), ("\n(+10?)", False), ("13\0", True)],
]


class SymbolTokenizer(CharTokenizer):
    """A chat template in characters below 64, the vocabulary of the tiny models."""

    def written(self, conversation: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        del opens_answer  # by nothing
        return "".join(
            f"({each['content']})" if each["role"] == "user" else f"{each['content']}\0\n"
            for each in conversation
        )


def groups() -> list[dict[str, Any]]:
    """The columns that an environment worker makes of the rows."""

    async def unasked(_: object) -> Any:
        raise AssertionError("an engine was asked")

    def columns(place: int, row: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.structs.replace(task(row, samples=1, prompt_index=place), version=0)
        environment = Demonstrations(SymbolTokenizer())
        made = run_group(
            asked,
            environment,
            unasked,
            SAMPLING,
            max_turns=1,
            max_model_len=64,
            policy=SampleFailurePolicy(),
        )
        return dict(asyncio.run(made)[1])

    return [columns(place, row) for place, row in enumerate(ROWS)]


def plain_loss(trainer: TorchTrainer) -> Tensor:
    """Mean negative log-likelihood of the learned tokens, one row after another."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for pieces in TEXTS:
        text = "".join(piece for piece, _ in pieces)
        is_learned = [learned for piece, learned in pieces for _ in piece]
        ids = torch.tensor([ord(char) for char in text])
        logprobs = trainer.module(input_ids=ids[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(is_learned):
            total = total - logprobs[place - 1, ids[place]]
            tokens += 1
    return total / tokens


@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_and_gradient_of_rows_are_those_of_a_plain_loop(
    trainer_of: MakeTrainer, chunks: int
) -> None:
    trainer, advantages = trainer_of(), [(0.0,)] * len(ROWS)
    want = plain_loss(trainer)
    want.backward()
    gradients = {
        name: each.grad.clone()
        for name, each in trainer.module.named_parameters()
        if each.grad is not None
    }
    trainer.module.zero_grad()

    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, SFT)
    tokens = 0
    for part in np.array_split(np.arange(len(ROWS)), chunks):
        key = key.next()
        made = groups()
        tokens += trainer.train_microbatch(
            key, build_chunk([made[i] for i in part]), [advantages[i] for i in part]
        ).tokens
    for name, each in trainer.module.named_parameters():
        if each.grad is not None:
            got = each.grad / tokens
            assert (got - gradients[name]).abs().max() <= 1e-10 * gradients[name].abs().max(), name
    trainer.abort_train_step(key)

    result = run_step(trainer_of(), (groups(), advantages), SFT, chunks)
    assert result.tokens == sum(len(piece) for row in TEXTS for piece, learned in row if learned)
    assert result.loss == pytest.approx(want.item(), rel=1e-12)


def test_a_step_of_rows_reports_nothing_about_engines(trainer_of: MakeTrainer) -> None:
    result = run_step(trainer_of(), (groups(), [(0.0,)] * len(ROWS)), SFT, 1)
    assert result.applied
    assert not [name for name in result.metrics if name.startswith("off_policy/")]


def test_the_end_token_is_learned() -> None:
    assert all(group["response_ids"][group["loss_mask"]][-1] == EOS_ID for group in groups())
