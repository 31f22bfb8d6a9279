"""One forward pass over packed rows, down to the log-probabilities of the wanted tokens.

Legend: R rows, T tokens of a row, U positions that predict, N wanted tokens, H hidden, V
vocabulary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.trainers.batches.packing import PackedRows, visible
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.logprobs import (
    largest_logprobs,
    token_logprobs,
    token_logprobs_and_entropies,
)
from offbeat.trainers.torch.sharding import settle


def packed_logprobs(
    model: PreTrainedModel, packed: PackedRows, temperature: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute log-probabilities [N] of the wanted tokens of a microbatch, ordered by ``source_N``.

    Computed in ``dtype``, if that is another than the weights are held in.

    Only the places that predict a wanted token reach the vocabulary: with rows padded and prompts
    masked out, the logits of all places would be most of the memory and much of the work.
    """
    return token_logprobs(*_logits(model, packed, dtype), temperature)


def packed_logprobs_and_entropies(
    model: PreTrainedModel, packed: PackedRows, temperature: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``packed_logprobs``, and the entropies [N] of what the tokens were drawn from."""
    return token_logprobs_and_entropies(*_logits(model, packed, dtype), temperature)


def _logits(
    model: PreTrainedModel, packed: PackedRows, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [U, V], and each wanted token's position in U and id, [N]."""
    device = model.device

    def tensor(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    with _only_places(output_head(model), tensor(packed.predicts_U)):
        logits_UV = model(
            input_ids=tensor(packed.input_ids_RT),
            position_ids=None if packed.one_branch_a_row else tensor(packed.positions_RT),
            attention_mask=_mask(packed, model.device, dtype or model.dtype),
            use_cache=False,
        ).logits
    return logits_UV, tensor(packed.which_N), tensor(packed.target_N)


@torch.no_grad()
def top_logprobs(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return the most probable tokens after prompts of equal length, by a plain forward pass."""
    tokens_RT = torch.tensor(prompts, device=model.device)
    rows, tokens = tokens_RT.shape
    last_U = torch.arange(1, rows + 1, device=model.device) * tokens - 1
    try:
        with _only_places(output_head(model), last_U):
            logits_UV = model(input_ids=tokens_RT, use_cache=False).logits
    except BaseException:
        settle(model, failed=True)
        raise
    settle(model)
    return largest_logprobs(logits_UV, count)


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that maps hidden states to logits.

    Raises:
        UntrainableModel: There is none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UntrainableModel(type(model).__name__, "has no output head", "Use a causal LM")
    return head


def _mask(packed: PackedRows, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return the additive mask [R, 1, T, T]; None if plain causal attention is exact."""
    if packed.one_branch_a_row:
        return None
    seen_RTT = torch.from_numpy(visible(packed.segments_RT)).to(device)
    mask_RTT = torch.zeros(seen_RTT.shape, dtype=dtype, device=device)
    return mask_RTT.masked_fill_(~seen_RTT, torch.finfo(dtype).min)[:, None]


@contextmanager
def _only_places(head: nn.Module, places_U: Tensor) -> Generator[None]:
    """Restrict the output head to the hidden states [U, H] of these positions inside the block.

    A hook in front of the head, because it works for every model: what a model does to its logits
    afterwards (a cap, a scale) is elementwise and does not care. Calling body and head one by one
    would skip it, and ``logits_to_keep`` keeps the same places of every row.
    """

    def select(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (hidden_RTH,) = inputs
        return (hidden_RTH.reshape(-1, hidden_RTH.shape[-1]).index_select(0, places_U),)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
