"""One forward pass over packed rows, down to the log-probabilities of the wanted tokens.

Legend: R rows, T tokens of a row, U positions ("places") that predict, N wanted tokens, H hidden, V
vocabulary.

The output head computes, uses and discards its logits chunk by chunk. For a row of 32k tokens and a
vocabulary of 49k, all logits would need 6 GiB in float32, and their gradient as much again. But
only a log-probability and an entropy are read per token. Each chunk of places computes both from
its own logits, and computes the logits again in backward.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypedDict, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from offbeat.models.media_passes import FeaturesOf, additive_mask, media_arguments, write_media
from offbeat.models.media_placing import blank
from offbeat.models.media_rules import media_rules
from offbeat.trainers.batches.packing import PackedRows, canary_rows, visible_in
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.logprobs import (
    find_share,
    largest_logprobs,
    token_logprobs,
    token_logprobs_and_entropies,
)
from offbeat.trainers.torch.model import vocabulary
from offbeat.trainers.torch.sharding import reset_after_error, settle
from offbeat.trainers.torch.split_attention import SPLIT

OfLogits = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""A function of logits [U, V], each token's place in U [N], and its id [N]. Returns tensors [N]."""

_ON_A_CPU: Final = 1 << 27
_ON_A_GPU: Final = 1 << 29
"""Number of logits per chunk: 512 MiB in float32, 1 GiB in bfloat16. Fewer need no chunks."""


def chunk_places(vocabulary: int, device: torch.device) -> int:
    """Return the number of places whose logits are computed together."""
    return max(1, (_ON_A_CPU if device.type == "cpu" else _ON_A_GPU) // vocabulary)


@contextmanager
def chunk_head(
    head: nn.Module, packed: PackedRows, compute: OfLogits, places: int
) -> Generator[Callable[[Tensor], tuple[Tensor, ...]]]:
    """Replace, inside the block, the output of a head by the result of ``compute`` on its logits.

    Hooks do this while the model's forward runs, because the weights of a sharded model exist only
    then. The model must return the head's output unchanged.

    Args:
        head: The module that maps hidden states to logits.
        packed: Microbatch with the places and tokens.
        compute: Function of the logits of a chunk.
        places: Number of places in a chunk.

    Yields:
        A function of the logits that the model returns. It returns tensors [N] in the order of
        ``packed.which_N``.
    """
    order_N = np.argsort(packed.which_N, kind="stable")
    hidden = list[Tensor]()

    def keep(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (hidden_RTH,) = inputs
        hidden_PH = hidden_RTH.reshape(-1, hidden_RTH.shape[-1])
        hidden.append(hidden_PH)
        return (hidden_PH[:0],)

    def replace(_: nn.Module, __: tuple[Tensor], ___: Tensor) -> Tensor:
        return _in_chunks(head, hidden.pop(), packed, order_N, compute, places)

    def unpack(returned: Tensor) -> tuple[Tensor, ...]:
        position_N = torch.from_numpy(np.argsort(order_N)).to(returned.device)
        return returned[:, position_N].unbind()

    handles = (head.register_forward_pre_hook(keep), head.register_forward_hook(replace))
    try:
        yield unpack
    finally:
        for handle in handles:
            handle.remove()


def _in_chunks(
    head: nn.Module,
    hidden_PH: Tensor,
    packed: PackedRows,
    order_N: np.ndarray[tuple[int], np.dtype[np.int64]],
    compute: OfLogits,
    places: int,
) -> Tensor:
    """Return the tensors [N] of ``compute``, stacked, in the order ``order_N``."""
    device = hidden_PH.device

    def of_chunk(hidden_UH: Tensor, which_N: Tensor, target_N: Tensor) -> Tensor:
        return torch.stack(compute(head.forward(hidden_UH), which_N, target_N))

    which_N, target_N = packed.which_N[order_N], packed.target_N[order_N]
    parts = list[Tensor]()
    for first in range(0, len(packed.predicts_U), places):
        begin, end = np.searchsorted(which_N, (first, first + places))
        predicts_U, own_N, targets_N = (
            torch.from_numpy(each).to(device, non_blocking=True)
            for each in (
                packed.predicts_U[first : first + places],
                which_N[begin:end] - first,
                target_N[begin:end],
            )
        )
        hidden_UH = hidden_PH.index_select(0, predicts_U)
        if torch.is_grad_enabled():
            part = checkpoint(
                of_chunk,
                hidden_UH,
                own_N,
                targets_N,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            part = of_chunk(hidden_UH, own_N, targets_N)
        parts.append(cast("Tensor", part))
    return torch.cat(parts, 1)


class PassOptions(TypedDict, total=False):
    """Settings of a pass."""

    plain_head: bool
    """Whether the head's outputs are the logits. If so, many places are computed in chunks."""

    features_of: FeaturesOf | None
    """Returns features of media, or None (the default) for the model's own encoder."""


def compute_packed_logprobs(
    model: PreTrainedModel,
    packed: PackedRows,
    temperature: float,
    dtype: torch.dtype | None = None,
    **options: Unpack[PassOptions],
) -> Tensor:
    """Compute log-probabilities [N] of a microbatch's wanted tokens, ordered by ``source_N``.

    Passes run in ``dtype``, even if the weights have a different dtype.

    Logits are computed only at places that predict a wanted token. With padded rows and masked
    prompts, the logits of all places would be most of the memory and much of the work.
    Tensor-parallel ranks that divide the rows of the head must call it together.
    """

    def read(*given: Any) -> tuple[Tensor]:  # noqa: ANN401 -- arguments of ``token_logprobs``
        return (token_logprobs(*given),)

    return _through_head(model, packed, read, temperature, dtype, **options)[0]


def compute_packed_logprobs_and_entropies(
    model: PreTrainedModel,
    packed: PackedRows,
    temperature: float,
    dtype: torch.dtype | None = None,
    **options: Unpack[PassOptions],
) -> tuple[Tensor, Tensor]:
    """Compute the results of ``compute_packed_logprobs``, and the tokens' entropies [N]."""
    read = token_logprobs_and_entropies
    logprobs_N, entropy_N = _through_head(model, packed, read, temperature, dtype, **options)
    return logprobs_N, entropy_N


def _through_head(
    model: PreTrainedModel,
    packed: PackedRows,
    read: Callable[..., tuple[Tensor, ...]],
    temperature: float,
    dtype: torch.dtype | None,
    **options: Unpack[PassOptions],
) -> tuple[Tensor, ...]:
    """Return the results of ``read`` on the logits [U, V], and each token's place in U and id."""
    head, device, features_of = output_head(model), model.device, options.get("features_of")
    share = find_share(head)  # its ranks have equal numbers of chunks

    def compute(logits_UV: Tensor, which_N: Tensor, target_N: Tensor) -> tuple[Tensor, ...]:
        return read(logits_UV, which_N, target_N, temperature, share)

    places = chunk_places(vocabulary(model) if share is None else share.most_rows, device)
    rules, media = media_rules(model.config), packed.media
    has_sharded_encoder = features_of is None and isinstance(model, FSDPModule)
    if media is None and rules.reads_media and has_sharded_encoder:
        # All ranks gather the encoder's weights and reduce its gradients, or no rank does
        media = blank(rules)
    if options.get("plain_head") and len(packed.predicts_U) > places:
        with (
            chunk_head(head, packed, compute, places) as unpack,
            write_media(model, rules, media, features_of),
        ):
            return unpack(_logits(model, packed, dtype))
    predicts_U, which_N, target_N = (
        torch.from_numpy(each).to(device, non_blocking=True)
        for each in (packed.predicts_U, packed.which_N, packed.target_N)
    )
    with _only_places(head, predicts_U), write_media(model, rules, media, features_of):
        logits_UV = _logits(model, packed, dtype)
    return compute(logits_UV, which_N, target_N)


def _logits(model: PreTrainedModel, packed: PackedRows, dtype: torch.dtype | None) -> Tensor:
    """Return the model's logits. Hooks on the output head select the places."""
    device = model.device
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(packed.input_ids_RT).to(device, non_blocking=True),
        "use_cache": False,
    }
    implementation = model.config._attn_implementation  # noqa: SLF001 -- the only place it is kept
    if not packed.one_branch_a_row:
        positions_RT = torch.from_numpy(packed.positions_RT)
        inputs["position_ids"] = positions_RT.to(device, non_blocking=True)
    inputs |= media_arguments(model, packed.media, lambda: visible_in(packed), dtype or model.dtype)
    if packed.one_branch_a_row or "attention_mask" in inputs:
        return model(**inputs).logits
    if packed.trees and implementation == SPLIT:
        # A mask of four axes is passed on. Without one, transformers would make a dense mask
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=device)
        inputs["trees"] = packed.trees
    else:
        seen_RTT = torch.from_numpy(visible_in(packed)).to(device)
        mask = additive_mask(seen_RTT, dtype or model.dtype)
    return model(attention_mask=mask, **inputs).logits


@torch.no_grad()
def top_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    features_of: FeaturesOf | None = None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return the most probable tokens after canary prompts of equal length, by a plain pass.

    A prompt with placeholders gets the canaries' medium. ``PassOptions`` describes ``features_of``.
    """
    rules, head = media_rules(model.config), output_head(model)
    rows = canary_rows(prompts, rules)
    last_U = torch.from_numpy(rows.predicts_U).to(model.device)
    with (
        reset_after_error(model),
        _only_places(head, last_U),
        write_media(model, rules, rows.media, features_of),
    ):
        logits_UV = _logits(model, rows, None)
    settle(model)
    return largest_logprobs(logits_UV, count, find_share(head))


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that maps hidden states to logits.

    Raises:
        UntrainableModel: The model has no such module.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UntrainableModel(type(model).__name__, "has no output head", "Use a causal LM")
    return head


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the head's outputs are the logits, without a later cap or scale."""
    known = torch.linspace(1, 100, vocabulary(model), dtype=torch.float32, device=model.device)

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
    """Restrict the output head, inside the block, to the hidden states [U, H] of these positions.

    A hook in front of the head works for every model, because later operations on the logits (a
    cap, a scale) are elementwise. Calling body and head separately would skip these operations.
    transformers' ``logits_to_keep`` could only keep the same places in every row.
    """

    def select(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (hidden_RTH,) = inputs
        return (hidden_RTH.reshape(-1, hidden_RTH.shape[-1]).index_select(0, places_U),)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()
