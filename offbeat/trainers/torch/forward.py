"""One forward pass over packed rows, down to the log-probabilities of the wanted tokens.

Legend: R rows, T tokens of a row, U positions that predict, N wanted tokens, H hidden, V
vocabulary.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from offbeat.multimodal.canary_pictures import canary_media
from offbeat.multimodal.picture_rules import picture_rules
from offbeat.multimodal.placing import RowSpan, blank, placed
from offbeat.multimodal.tower import FeaturesOf, additive_mask, features, masks_by_kind, pictures_in
from offbeat.trainers.batches.packing import PackedRows, visible_in
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.chunked_head import OfLogits, chunk_places, chunked_head
from offbeat.trainers.torch.logprobs import (
    largest_logprobs,
    token_logprobs,
    token_logprobs_and_entropies,
)
from offbeat.trainers.torch.model import vocabulary
from offbeat.trainers.torch.sharding import settle
from offbeat.trainers.torch.split_attention import SPLIT
from offbeat.trainers.torch.vocabulary_rows import share_of


def packed_logprobs(
    model: PreTrainedModel,
    packed: PackedRows,
    temperature: float,
    dtype: torch.dtype | None = None,
    *,
    plain_head: bool = False,
    features_of: FeaturesOf | None = None,
) -> Tensor:
    """Compute log-probabilities [N] of the wanted tokens of a microbatch, ordered by ``source_N``.

    Computed in ``dtype``, if that is another than the weights are held in.

    Only the places that predict a wanted token reach the vocabulary: with rows padded and prompts
    masked out, the logits of all places would be most of the memory and much of the work. With a
    ``plain_head``, whose output are the logits, those of many places are computed chunk by chunk.
    ``features_of`` gives features of pictures; None: the model's own tower computes them.
    Tensor-parallel ranks that divide the rows of the head call it together.
    """
    share = share_of(output_head(model))

    def compute(logits_UV: Tensor, which_N: Tensor, target_N: Tensor) -> tuple[Tensor]:
        return (token_logprobs(logits_UV, which_N, target_N, temperature, share),)

    (logprobs_N,) = _through_head(model, packed, compute, dtype, plain_head, features_of)
    return logprobs_N


def packed_logprobs_and_entropies(
    model: PreTrainedModel,
    packed: PackedRows,
    temperature: float,
    dtype: torch.dtype | None = None,
    *,
    plain_head: bool = False,
    features_of: FeaturesOf | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``packed_logprobs``, and the entropies [N] of what the tokens were drawn from."""
    share = share_of(output_head(model))

    def compute(logits_UV: Tensor, which_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropies(logits_UV, which_N, target_N, temperature, share)

    logprobs_N, entropy_N = _through_head(model, packed, compute, dtype, plain_head, features_of)
    return logprobs_N, entropy_N


def _through_head(
    model: PreTrainedModel,
    packed: PackedRows,
    compute: OfLogits,
    dtype: torch.dtype | None,
    plain_head: bool,  # noqa: FBT001 -- of functions above, which name it
    features_of: FeaturesOf | None,
) -> tuple[Tensor, ...]:
    """Return what ``compute`` makes of the logits [U, V], and of each token's place in U and id."""
    head, device = output_head(model), model.device
    share = share_of(head)  # whose ranks have equal numbers of chunks
    places = chunk_places(vocabulary(model) if share is None else share.most_rows, device)
    rules, pictures = picture_rules(model.config), packed.pictures
    has_sharded_tower = features_of is None and isinstance(model, FSDPModule)
    if pictures is None and rules is not None and has_sharded_tower:
        # All ranks gather the tower's weights and reduce its gradients, or none does.
        pictures = blank(rules)
    if plain_head and len(packed.predicts_U) > places:
        with (
            chunked_head(head, packed, compute, places) as unpack,
            pictures_in(model, rules, pictures, features_of or features),
        ):
            return unpack(_logits(model, packed, dtype))
    predicts_U, which_N, target_N = (
        torch.from_numpy(each).to(device, non_blocking=True)
        for each in (packed.predicts_U, packed.which_N, packed.target_N)
    )
    features_of = features_of or features
    with _only_places(head, predicts_U), pictures_in(model, rules, pictures, features_of):
        logits_UV = _logits(model, packed, dtype)
    return compute(logits_UV, which_N, target_N)


def _logits(model: PreTrainedModel, packed: PackedRows, dtype: torch.dtype | None) -> Tensor:
    """Return what the model returns as its logits; hooks of its head choose of which places."""
    device = model.device
    input_ids_RT = torch.from_numpy(packed.input_ids_RT).to(device, non_blocking=True)
    further: dict[str, object] = {}
    positions_RT = torch.from_numpy(packed.positions_RT)
    if packed.pictures is not None and packed.pictures.axes_3RT is not None:
        positions_RT = torch.from_numpy(packed.pictures.axes_3RT)
        further["position_ids"] = positions_RT.to(device, non_blocking=True)
    opens = packed.pictures is not None and packed.pictures.blocks_K is not None
    if packed.one_branch_a_row and not opens:
        return model(input_ids=input_ids_RT, use_cache=False, **further).logits
    implementation = model.config._attn_implementation  # noqa: SLF001 -- the only place it is kept
    if opens and packed.pictures is not None:
        seen_RTT = torch.from_numpy(packed.pictures.opened(visible_in(packed))).to(device)
        mask = masks_by_kind(model, seen_RTT, dtype or model.dtype)
    elif packed.trees and implementation == SPLIT:
        # A mask of four axes is handed on as it is; without one transformers would make a dense one.
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)
        further["trees"] = packed.trees
    else:
        seen_RTT = torch.from_numpy(visible_in(packed)).to(device)
        mask = additive_mask(seen_RTT, dtype or model.dtype)
    further["position_ids"] = positions_RT.to(device, non_blocking=True)
    return model(input_ids=input_ids_RT, attention_mask=mask, use_cache=False, **further).logits


@torch.no_grad()
def top_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    features_of: FeaturesOf | None = None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return the most probable tokens after canary prompts of equal length, by a plain forward pass.

    Those with placeholders have the picture of canaries. ``features_of``: as of ``packed_logprobs``.
    """
    tokens_RT = torch.tensor(prompts, device=model.device)
    rows, tokens = tokens_RT.shape
    rules = picture_rules(model.config)
    pictures, further = None, dict[str, Any]()
    if rules is not None:
        spans = [RowSpan(row, row * tokens, (row + 1) * tokens) for row in range(rows)]
        positions_RT = np.tile(np.arange(tokens), (rows, 1))
        pictures = placed(rules, prompts, canary_media(rules, prompts), spans, positions_RT)
    if pictures is not None and pictures.axes_3RT is not None:
        further["position_ids"] = torch.from_numpy(pictures.axes_3RT).to(model.device)
    if pictures is not None and pictures.blocks_K is not None:
        seen_RTT = pictures.opened(np.tile(np.tri(tokens, dtype=np.bool_), (rows, 1, 1)))
        seen = torch.from_numpy(seen_RTT).to(model.device)
        further["attention_mask"] = masks_by_kind(model, seen, model.dtype)
    last_U = torch.arange(1, rows + 1, device=model.device) * tokens - 1
    try:
        given = features_of or features
        with _only_places(output_head(model), last_U), pictures_in(model, rules, pictures, given):
            logits_UV = model(input_ids=tokens_RT, use_cache=False, **further).logits
    except BaseException:
        settle(model, failed=True)
        raise
    settle(model)
    return largest_logprobs(logits_UV, count, share_of(output_head(model)))


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that maps hidden states to logits.

    Raises:
        UntrainableModel: There is none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UntrainableModel(type(model).__name__, "has no output head", "Use a causal LM")
    return head


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the head's output are the logits: no cap or scale is applied to it after."""
    known = torch.linspace(1, 100, vocabulary(model), device=model.device)

    def replace(_: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
        return known.to(output.dtype).expand(output.shape)

    handle = output_head(model).register_forward_hook(replace)
    try:
        with torch.no_grad():
            token_RT = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
            logits = model(input_ids=token_RT, use_cache=False).logits
    finally:
        handle.remove()
    return torch.equal(logits[0, 0], known.to(logits.dtype))


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
