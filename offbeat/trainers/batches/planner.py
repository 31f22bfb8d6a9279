"""Planning of the microbatches that a rank computes one by one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from offbeat.multimodal.rules import TEXT_ONLY, MediaRules
from offbeat.trainers.batches.packing import Batch, PackedRow, PackedRows, flatten, pack
from offbeat.trainers.batches.row_costs import RowCosts, RowLayout
from offbeat.trainers.batches.rows import (
    best_response_tokens,
    plan_flat_microbatches,
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
    call_pairs: float | None = field(default=None, kw_only=True)
    """Cost of one call of split attention, over that of a pair; None: the model cannot split it."""
    media_rules: MediaRules = field(default=TEXT_ONLY, kw_only=True)
    """Media that the model reads."""

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        """Return the concatenated groups, and microbatches with each wanted token in one of them.

        Their layout is the one that costs least. Without groups the batch is None and there are no
        microbatches.

        Raises:
            UnfitColumns: As ``flatten``.
        """
        if not groups:
            return None, []
        batch = flatten(
            groups,
            only_trained=only_trained,
            vocabulary=self.vocabulary,
            media_rules=self.media_rules,
        )
        layout, microbatches = self._cheapest(batch)
        flat = layout is RowLayout.SPLIT
        return batch, [pack(batch, each, flat=flat) for each in microbatches]

    def _cheapest(self, batch: Batch) -> tuple[RowLayout, list[list[PackedRow]]]:
        plans = dict(self._plans(batch))
        if len(plans) == 1:
            return next(iter(plans.items()))
        costs = RowCosts(self.ratio_tokens, self.call_pairs or 0.0)
        return min(plans.items(), key=lambda plan: costs.of(*plan, batch))

    def _plans(self, batch: Batch) -> Iterator[tuple[RowLayout, list[list[PackedRow]]]]:
        """Yield the layouts that are exact for the model, with the microbatches of each."""

        def rows(response_tokens: float) -> list[PackedRow]:
            return plan_rows(batch, response_tokens=response_tokens, max_tokens=self.max_tokens)

        if self.shared_prompt:
            prompt_tokens = sum(map(len, batch.prompts)) / len(batch.prompts)
            shared = rows(best_response_tokens(prompt_tokens, self.ratio_tokens))
            yield RowLayout.DENSE, list(plan_microbatches(shared, self.max_tokens))
        if self.call_pairs is not None:
            whole = rows(math.inf if self.shared_prompt else 0.0)
            yield RowLayout.SPLIT, list(plan_flat_microbatches(whole, self.max_tokens))
        if self.call_pairs is not None or not self.shared_prompt:
            yield RowLayout.APART, list(plan_microbatches(rows(0.0), self.max_tokens))
