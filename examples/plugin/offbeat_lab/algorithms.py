"""A loss and an advantage. Legend: N tokens."""

from collections.abc import Mapping, Sequence
from typing import Any


def centred(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of its group."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def bounded(tokens: Any, options: Mapping[str, Any]) -> Any:
    """Return the loss of each token, with the ratio of probabilities bounded from above."""
    ratio_N = (tokens.logprobs_N - tokens.old_N).clamp(-20, 20).exp()
    loss_N = -ratio_N.clamp(max=options.get("bound", 2.0)) * tokens.advantages_N
    return loss_N, {"ratio": ratio_N}
