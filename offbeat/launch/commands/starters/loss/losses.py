"""The loss: a number for each token, as in PPO.

offbeat adds KL and entropy, leaves out tokens that are not trained, and divides by algorithm.loss.normalize.
"""

from typing import Any


def loss(tokens: Any, options: dict[str, Any]) -> Any:
    """Return the loss of each of N tokens, and values to show as the metrics loss/NAME."""
    clip = options.get("clip", 0.2)
    ratio_N = (tokens.logprobs_N - tokens.old_N).clamp(-20, 20).exp()
    clipped_N = ratio_N.clamp(1 - clip, 1 + clip)
    loss_N = -(ratio_N * tokens.advantages_N).minimum(clipped_N * tokens.advantages_N)
    return loss_N, {"ratio": ratio_N}
