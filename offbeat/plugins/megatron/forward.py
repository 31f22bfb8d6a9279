"""Forward and backward passes over microbatches by the library's schedules.

Every stage of a pipeline receives the same microbatches. The first stage reads their tokens and
media. The last stage passes the log-probabilities of the wanted tokens to the caller. Stages send
hidden states to each other.

Legend: R rows, T tokens of a row, U positions that predict, N wanted tokens, H hidden, V
vocabulary or this rank's columns of it, O tokens of this rank's context share, S tokens of these
with embeddings on this rank, K placeholders of media among them.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types.

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from offbeat.config.sections.loss import Normalize
from offbeat.plugins.megatron.context import sum_over_ranks
from offbeat.plugins.megatron.groups import context_group, tensor_group
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.model import PackedRotary
from offbeat.plugins.megatron.token_share import TokenShare, axes_share, media_share, token_share
from offbeat.plugins.megatron.tower import FeatureSource
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import Ints, PackedRows
from offbeat.trainers.expert_load import loss_weights
from offbeat.trainers.torch.logprobs import (
    NEVER,
    VocabularyShare,
    largest_logprobs,
    token_logprobs_and_entropies,
)


def own_columns(
    logits_UV: Tensor, vocabulary: int, group: ProcessGroup
) -> tuple[Tensor, VocabularyShare | None]:
    """Return this rank's logits without padding, and its vocabulary share, or None for all of it.

    Columns behind the vocabulary are padding, with zero gradient. A rank with only padding keeps
    one column, for a token that is never drawn, so that this rank participates in every collective.

    Args:
        logits_UV: [U, V] floating: this rank's columns. Those of rank r start at ``r * V``.
        vocabulary: Number of columns over all ranks, without padding.
        group: The tensor-parallel ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return logits_UV[:, :vocabulary], None
    cuts = tuple(min(vocabulary, each * logits_UV.shape[1]) for each in range(ranks + 1))
    share = VocabularyShare(cuts, rank, group)
    if share.rows:
        return logits_UV[:, : share.rows], share
    return torch.where(
        torch.zeros_like(logits_UV[:, :1], dtype=torch.bool), logits_UV[:, :1], NEVER
    ), share


Consume = Callable[[PackedRows, Tensor, Tensor], Tensor]
"""(microbatch, log-probabilities [N], entropies [N]) -> a sum to differentiate.

Called on the last stage only."""

_Loss = Callable[[PackedRows, TokenShare, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(microbatch, this rank's part of it, its logits [1, U, V]) -> loss for the schedules."""


class Forward:
    """Runs one rank's share of a model by the library's schedules.

    Args:
        wrapped: The model as the schedules get it: bare, or inside data parallelism.
        model: The model itself.
        layout: This rank's place in the world.
        vocabulary: Number of token ids, without padding.
        features_of: Source of the features of media, on a first stage that reads any.
    """

    def __init__(
        self,
        wrapped: nn.Module,
        model: GPTModel,
        layout: ParallelLayout,
        vocabulary: int,
        features_of: FeatureSource | None = None,
    ) -> None:
        self._wrapped, self._model = wrapped, model
        self.layout, self._vocabulary = layout, vocabulary
        self.config = model.config
        self._features_of = features_of
        self._device = next(model.parameters()).device
        self._sequence_parallel = model.config.sequence_parallel
        self._has_experts = model.config.num_moe_experts is not None

    def run(
        self,
        microbatches: Sequence[PackedRows],
        consume: Consume,
        temperature: float,
        *,
        trains: Normalize | None = None,
    ) -> None:
        """Call the schedule once.

        ``trains``: normalisation of the loss, whose gradients are added to the buffers. None:
        forward passes only.

        A microbatch without wanted tokens is computed like any other, because its ranks participate
        in collectives. Without microbatches the schedule is not called. Then no other rank may call
        it.
        """
        self._run(microbatches, partial(self._loss, consume, temperature), trains)

    def top_logprobs(self, microbatch: PackedRows, count: int) -> TopLogprobs | None:
        """Return the top tokens at the positions that predict, or None before the last stage."""
        kept = list[TopLogprobs]()

        def keep(
            packed: PackedRows, share: TokenShare, logits_1UV: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            own_UV, columns = own_columns(logits_1UV[0], self._vocabulary, tensor_group())
            logits_UV = self._whole(own_UV[: len(share.own_U)], share.own_U, packed.predicts_U)
            kept.append(largest_logprobs(logits_UV, count, columns))
            return logits_1UV.sum(), torch.zeros((), dtype=torch.int, device=self._device), {}

        self._run([microbatch], keep, None)
        return kept[0] if kept else None

    def _run(
        self, microbatches: Sequence[PackedRows], loss: _Loss, trains: Normalize | None
    ) -> None:
        if not microbatches:
            return
        rows, tokens = microbatches[0].input_ids_RT.shape
        get_forward_backward_func()(
            forward_step_func=partial(self._step, loss, trains),
            data_iterator=iter(microbatches),
            model=[self._wrapped],
            num_microbatches=len(microbatches),
            seq_length=tokens,  # unused: stages send their shapes to each other
            micro_batch_size=rows,
            forward_only=trains is None,
        )

    def _step(
        self,
        loss: _Loss,
        trains: Normalize | None,
        source: Iterator[PackedRows],
        wrapped: nn.Module,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        packed = next(source)
        share = token_share(packed, self.layout.context_rank, self.layout.grid.context)
        positions_RO = self._tensor(share.positions_RO)
        rotary = cast("PackedRotary", self._model.rotary_pos_emb)
        rotary.positions = None if share.segments_RT is None else positions_RO
        if packed.media is not None and packed.media.axes_3RT is not None:
            rotary.positions = self._tensor(axes_share(packed.media.axes_3RT, self.layout))
        with self._write_media(packed), self._only_places(self._tensor(share.predicts_U)):
            output = wrapped(
                self._tensor(share.input_ids_RO),
                positions_RO,
                None if share.segments_RT is None else torch.from_numpy(share.segments_RT),
                padding_mask=self._loss_weights(share, trains),
            )
        return output, partial(loss, packed, share)

    def _loss(
        self,
        consume: Consume,
        temperature: float,
        packed: PackedRows,
        share: TokenShare,
        logits_1UV: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        own_UV, columns = own_columns(logits_1UV[0], self._vocabulary, tensor_group())
        own_N = token_logprobs_and_entropies(
            own_UV,
            self._tensor(share.which_N),
            self._tensor(packed.target_N[share.own_N]),
            temperature,
            columns,
        )
        logprobs_N, entropy_N = (self._whole(each, share.own_N, packed.target_N) for each in own_N)
        loss = consume(packed, logprobs_N, entropy_N) if len(packed.target_N) else logprobs_N.sum()
        # No tokens, because the library would divide by them at the end of every call.
        return loss, torch.zeros((), dtype=torch.int, device=self._device), {}

    def _whole(self, own: Tensor, places: Ints, like: Ints) -> Tensor:
        """Return values [N, ...] of a whole microbatch from the values at this rank's places."""
        if self.layout.grid.context == 1:
            return own
        whole = own.new_zeros(len(like), *own.shape[1:])
        return sum_over_ranks(whole.index_copy(0, self._tensor(places), own), context_group())

    def _loss_weights(self, share: TokenShare, trains: Normalize | None) -> Tensor | None:
        """Return tokens' weights [R, O] in the routers' losses, or None if no router is trained.

        They reach the layers of experts as the library's padding mask, which nothing else reads
        (``router.py``). With sequence parallelism the library cuts them to the rank's part on the
        first stage. On other stages they are cut here.
        """
        if trains is None or not self._has_experts:
            return None
        weight_RO = loss_weights(share.sample_tokens_RO, trains).to(self._device)
        if self._sequence_parallel and not self.layout.is_first_stage:
            parts = weight_RO.chunk(self.layout.grid.tensor, dim=1)
            return parts[self.layout.tensor_rank].contiguous()
        return weight_RO

    @contextmanager
    def _write_media(self, packed: PackedRows) -> Generator[None]:
        """Replace the embeddings of placeholders by features of media inside the block.

        Features for deeper layers are added to the outputs of the first layers.
        """
        media, features_of = packed.media, self._features_of
        if media is None or features_of is None:
            yield
            return
        share = media_share(
            media,
            packed.input_ids_RT.shape,
            self.layout,
            sequence_parallel=self._sequence_parallel,
        )
        places_K, sources_K = self._tensor(share.places_K), self._tensor(share.sources_K)

        handles = list[RemovableHandle]()

        def equal_share(gradient: Tensor) -> Tensor:
            return gradient / self.layout.grid.tensor

        def at_places(made_FH: Tensor, like: Tensor) -> Tensor:
            if made_FH.requires_grad and not self._sequence_parallel:
                # Each rank that shares matrices has the whole gradient, and all are summed.
                made_FH.register_hook(equal_share)
            return made_FH.to(like.dtype).index_select(0, sources_K)

        def write(_: nn.Module, __: tuple[Tensor, ...], embedded_SRH: Tensor) -> Tensor:
            made = features_of(media.media)
            for layer, deep_FH in zip(self._model.decoder.layers, made.deep, strict=False):
                handles.append(layer.register_forward_hook(partial(add, deep_FH)))
            flat = embedded_SRH.reshape(-1, embedded_SRH.shape[-1])
            written = flat.index_copy(0, places_K, at_places(made.embedded_FH, flat))
            return written.view_as(embedded_SRH)

        def add(
            deep_FH: Tensor, _: nn.Module, __: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor]:
            hidden_SRH, context = output
            flat = hidden_SRH.reshape(-1, hidden_SRH.shape[-1])
            added = flat.index_add(0, places_K, at_places(deep_FH, flat))
            return added.view_as(hidden_SRH), context

        handles.append(self._model.embedding.register_forward_hook(write))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _only_places(self, places_U: Tensor) -> Generator[None]:
        """Restrict the output head to hidden states [U, 1, H] of these positions in the block."""
        if not self.layout.is_last_stage:
            yield
            return

        def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_TRH = inputs[0]
            if self._sequence_parallel:
                # The backward of the head sums the ranks' gradients of the selected positions.
                # So whole gradients arrive here, and each rank keeps those of its own tokens.
                hidden_TRH = gather_from_sequence_parallel_region(
                    hidden_TRH, tensor_parallel_output_grad=False, group=tensor_group()
                )
            flat = hidden_TRH.transpose(0, 1).reshape(-1, 1, hidden_TRH.shape[-1])
            return (flat.index_select(0, places_U), *inputs[1:])

        handle = self._model.output_layer.register_forward_pre_hook(select)
        try:
            yield
        finally:
            handle.remove()

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
