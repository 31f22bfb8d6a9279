"""One rank's groups, cut into the microbatches that it computes one by one."""

from dataclasses import dataclass

from offbeat.actors.trainers.batches.packing import Batch, Packed, pack
from offbeat.actors.trainers.batches.rows import (
    best_response_tokens,
    plan_microbatches,
    plan_rows,
)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How rows are laid out."""

    max_tokens: int  # of a microbatch, padding included
    shared_prompt: bool
    ratio_tokens: float  # cost of a token outside attention, over that of a pair of tokens inside

    def cut(self, batch: Batch | None) -> list[Packed]:
        """Every wanted token of a batch, in one of the microbatches; none of none."""
        if batch is None:
            return []
        response_tokens = 0.0
        if self.shared_prompt:
            prompt_tokens = sum(map(len, batch.prompts)) / len(batch.prompts)
            response_tokens = best_response_tokens(prompt_tokens, self.ratio_tokens)
        rows = plan_rows(batch, response_tokens=response_tokens, max_tokens=self.max_tokens)
        return [pack(batch, each) for each in plan_microbatches(rows, self.max_tokens)]
