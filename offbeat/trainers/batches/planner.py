"""Planning of the microbatches that a rank computes one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.trainers.batches.packing import Batch, PackedRows, flatten, pack
from offbeat.trainers.batches.rows import (
    best_response_tokens,
    plan_microbatches,
    plan_rows,
)
from offbeat.transfer_queue.schema import Columns


@dataclass(frozen=True, slots=True)
class MicrobatchPlanner:
    """Splits a rank's groups into microbatches by the limits of a trainer and its model."""

    max_tokens: int  # per microbatch, padding included
    shared_prompt: bool
    ratio_tokens: float  # cost of a token outside attention, over that of a pair of tokens inside
    vocabulary: int  # token ids of the model

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        """Return the concatenated groups, and microbatches with each wanted token in one of them.

        Without groups the batch is None and there are no microbatches.

        Raises:
            UnfitColumns: A group's columns do not fit each other, or the model's vocabulary.
        """
        if not groups:
            return None, []
        batch = flatten(groups, only_trained=only_trained, vocabulary=self.vocabulary)
        response_tokens = 0.0
        if self.shared_prompt:
            prompt_tokens = sum(map(len, batch.prompts)) / len(batch.prompts)
            response_tokens = best_response_tokens(prompt_tokens, self.ratio_tokens)
        rows = plan_rows(batch, response_tokens=response_tokens, max_tokens=self.max_tokens)
        return batch, [pack(batch, each) for each in plan_microbatches(rows, self.max_tokens)]
