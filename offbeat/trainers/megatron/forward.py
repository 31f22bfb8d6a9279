"""Forward and backward passes over microbatches by the library's schedules.

Every stage of a pipeline receives the same microbatches. The first reads their tokens, the last
gives the log-probabilities of the wanted tokens to the caller; hidden states are sent between them.

Legend: R rows, T tokens of a row, U positions that predict, N wanted tokens, H hidden, V
vocabulary.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types.

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.trainers.batches.packing import PackedRows, visible
from offbeat.trainers.megatron.groups import tensor_group
from offbeat.trainers.megatron.layout import ParallelLayout
from offbeat.trainers.megatron.model import PackedRotary
from offbeat.trainers.megatron.vocabulary import vocabulary_logprobs, whole_logits

Consume = Callable[[PackedRows, Tensor, Tensor], Tensor]
"""(microbatch, log-probabilities [N], entropies [N]) -> a sum to differentiate.

Called on the last stage only."""

_Loss = Callable[[PackedRows, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(microbatch, this rank's logits [1, U, V]) -> what the library's schedules want of a loss."""


class Forward:
    """Runs one rank's share of a model by the library's schedules.

    Args:
        wrapped: The model as it was given to the schedules: bare, or inside data parallelism.
        model: The model itself.
        layout: This rank's place in the world.
        vocabulary: Number of token ids, without padding.
    """

    def __init__(
        self, wrapped: nn.Module, model: GPTModel, layout: ParallelLayout, vocabulary: int
    ) -> None:
        self._wrapped, self._model = wrapped, model
        self._layout, self._vocabulary = layout, vocabulary
        self._device = next(model.parameters()).device
        self._sequence_parallel = model.config.sequence_parallel

    def run(
        self,
        microbatches: Sequence[PackedRows],
        consume: Consume,
        temperature: float,
        *,
        backward: bool,
    ) -> None:
        """Call the schedule once. With ``backward``, gradients are added to the buffers.

        A microbatch without wanted tokens is computed like any other, because its ranks take part
        in collectives. Without microbatches nothing is called, and no other rank may call either.
        """
        self._run(microbatches, partial(self._loss, consume, temperature), backward=backward)

    def logits(self, microbatch: PackedRows) -> Tensor | None:
        """Return logits [U, V] of the positions that predict; None on all stages but the last."""
        kept = list[Tensor]()

        def keep(_: PackedRows, logits_1UV: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            kept.append(whole_logits(logits_1UV[0], self._vocabulary, tensor_group()))
            return logits_1UV.sum(), torch.zeros((), dtype=torch.int, device=self._device), {}

        self._run([microbatch], keep, backward=False)
        return kept[0] if kept else None

    def _run(self, microbatches: Sequence[PackedRows], loss: _Loss, *, backward: bool) -> None:
        if not microbatches:
            return
        rows, tokens = microbatches[0].input_ids_RT.shape
        get_forward_backward_func()(
            forward_step_func=partial(self._step, loss),
            data_iterator=iter(microbatches),
            model=[self._wrapped],
            num_microbatches=len(microbatches),
            seq_length=tokens,  # unused: stages send their shapes to each other
            micro_batch_size=rows,
            forward_only=not backward,
        )

    def _step(
        self, loss: _Loss, source: Iterator[PackedRows], wrapped: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        packed = next(source)
        positions_RT = self._tensor(packed.positions_RT)
        rotary = cast("PackedRotary", self._model.rotary_pos_emb)
        rotary.positions_RT = None if packed.one_branch_a_row else positions_RT
        places_U = packed.predicts_U if len(packed.predicts_U) else np.zeros(1, np.int64)
        with self._only_places(self._tensor(places_U)):
            output = wrapped(self._tensor(packed.input_ids_RT), positions_RT, self._mask(packed))
        return output, partial(loss, packed)

    def _loss(
        self, consume: Consume, temperature: float, packed: PackedRows, logits_1UV: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        which_N, target_N = self._tensor(packed.which_N), self._tensor(packed.target_N)
        logprobs_N, entropy_N = vocabulary_logprobs(
            logits_1UV[0], which_N, target_N, temperature, self._vocabulary, tensor_group()
        )
        loss = consume(packed, logprobs_N, entropy_N) if len(packed.target_N) else logprobs_N.sum()
        # No tokens: the library would divide by them at the end of every call.
        return loss, torch.zeros((), dtype=torch.int, device=self._device), {}

    def _mask(self, packed: PackedRows) -> Tensor | None:
        """Return the mask [R, 1, T, T] bool, True where hidden; None for plain causal attention."""
        if packed.one_branch_a_row:
            return None
        return ~torch.from_numpy(visible(packed.segments_RT)).to(self._device)[:, None]

    @contextmanager
    def _only_places(self, places_U: Tensor) -> Generator[None]:
        """Restrict the output head to the hidden states [U, 1, H] of these positions in the block."""
        if not self._layout.is_last_stage:
            yield
            return

        def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_TRH = inputs[0]
            if self._sequence_parallel:
                # The backward of the head sums the ranks' gradients of the selected positions:
                # whole ones arrive here, and each rank keeps those of its own tokens.
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

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
