"""Reference forward pass of a model, and the bound of its rounding errors."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.multimodal.tower import picture_inputs, token_kinds

TOLERANCES: Final = {
    torch.float64: 1e-3,  # transformers computes norms, softmax and rotary angles in float32
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.5,
}
"""Largest mean distance of a sample's log-probabilities, in nats; see docs/model-proofs.md."""


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, tokens: Sequence[int], first: int = 0, media: Media | None = None
) -> Tensor:
    """Return log-probabilities [T - 1] of the tokens after the first, by one plain forward pass.

    Args:
        model: Model with its attention configured.
        tokens: T tokens, in one row.
        first: Position of the first token. With 0, the model computes positions itself.
        media: Pictures, to which all placeholder ids among the tokens belong.

    Returns:
        [T - 1] float32.
    """
    row = torch.tensor([tokens], device=model.device)
    places = torch.arange(first, first + len(tokens), device=model.device)[None]
    further = {"position_ids": places} if first else {}
    if media is not None:
        further |= picture_inputs(model, [media]) | token_kinds(model, row)
    logits = model(input_ids=row, use_cache=False, **further).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@torch.no_grad()
def check_last_position(model: PreTrainedModel, max_model_len: int) -> None:
    """Compute one token at the last position, if the model takes positions.

    Raises:
        IndexError: The model's table of positions is shorter.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, position_ids=token + max_model_len - 1, use_cache=False)


def distance(got: Tensor, want: Tensor) -> float:
    """Return the mean absolute difference of two log-probabilities; infinity if any is NaN.

    The mean, not the largest: in 16 bits a router may choose another expert for a token or two.
    """
    gap = (got.float() - want.float()).abs().mean().item() if len(want) else 0.0
    return gap if gap == gap else float("inf")  # noqa: PLR0124 -- NaN is not itself


def attend_by(model: PreTrainedModel, implementation: str) -> bool:
    """Set a model's attention implementation; return False for classes that cannot be switched."""
    if model.config._attn_implementation != implementation:  # noqa: SLF001 -- the only place it is kept
        model.set_attn_implementation(implementation)
    return model.config._attn_implementation == implementation  # noqa: SLF001 -- as above


@contextmanager
def eager_attention(model: PreTrainedModel) -> Generator[None]:
    """Use transformers' eager attention in the block, if the model supports it."""
    chosen = model.config._attn_implementation or "eager"  # noqa: SLF001 -- as above
    attend_by(model, "eager")
    try:
        yield
    finally:
        attend_by(model, chosen)
