"""Reference forward pass of a model, and the bound of its rounding errors."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOLERANCES: Final = {
    torch.float64: 1e-3,  # transformers computes norms, softmax and rotary angles in float32
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.5,
}
"""Largest mean distance in nat of a sample's log-probabilities; docs/model-proofs.md says why these."""


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, tokens: Sequence[int], first: int = 0) -> Tensor:
    """Log-probability [T - 1] of every token after the first, in float32, by one plain forward pass.

    Args:
        model: Attends as it is configured to.
        tokens: T of them, in one row.
        first: Position of the first. With 0, positions are left to the model.
    """
    row = torch.tensor([tokens], device=model.device)
    places = torch.arange(first, first + len(tokens), device=model.device)[None]
    further = {"position_ids": places} if first else {}
    logits = model(input_ids=row, use_cache=False, **further).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@torch.no_grad()
def check_last_position(model: PreTrainedModel, max_model_len: int) -> None:
    """Compute one token at the last position, if the model takes positions.

    Raises:
        IndexError: The model has a table of positions, and it ends before.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, position_ids=token + max_model_len - 1, use_cache=False)


def distance(got: Tensor, want: Tensor) -> float:
    """Mean absolute difference of one sample's log-probabilities; infinity if any is not a number.

    The mean, not the largest: in 16 bits a router may choose another expert for a token or two.
    """
    gap = (got.float() - want.float()).abs().mean().item() if len(want) else 0.0
    return gap if gap == gap else float("inf")  # noqa: PLR0124 -- NaN is not itself


def attend_by(model: PreTrainedModel, implementation: str) -> bool:
    """Have a model attend by an implementation; whether it does: some classes cannot be switched."""
    if model.config._attn_implementation != implementation:  # noqa: SLF001 -- the only place it is kept
        model.set_attn_implementation(implementation)
    return model.config._attn_implementation == implementation  # noqa: SLF001 -- as above


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model attends by transformers' own definition, if it lets itself be switched."""
    chosen = model.config._attn_implementation or "eager"  # noqa: SLF001 -- as above
    attend_by(model, "eager")
    try:
        yield
    finally:
        attend_by(model, chosen)
