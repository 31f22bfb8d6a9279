"""Assignment of the groups of a step to minibatches. Pure.

Groups are drawn into minibatches by seed and step, so that neither the order in which they were
finished nor that of the prompts decides which are trained together: short samples come first.
"""

import random
from collections.abc import Sequence


class MinibatchAssigner:
    """Assigns the groups of one attempt at a step; its chunks may come in any number."""

    def __init__(self, minibatches: int, seed: int, step: int) -> None:
        self._minibatches, self._seed = minibatches, f"{seed}/{step}/minibatches"
        self._assigned = 0

    def of(self, prompt_indices: Sequence[int]) -> tuple[int, ...]:
        """Return the minibatch of each group of the next chunk, from 0; empty if there is only one.

        Over all chunks, two minibatches differ by one group at most. With one chunk the result
        depends on the set of the groups alone.
        """
        if self._minibatches == 1:
            return ()
        drawn = sorted(prompt_indices)
        random.Random(f"{self._seed}/{self._assigned}").shuffle(drawn)
        minibatch_of = {
            prompt_index: (self._assigned + place) % self._minibatches
            for place, prompt_index in enumerate(drawn)
        }
        self._assigned += len(drawn)
        return tuple(minibatch_of[prompt_index] for prompt_index in prompt_indices)
