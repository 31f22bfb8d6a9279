"""Log-probabilities the slow way: one unpadded sample after another, by transformers alone."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def plain_logprobs(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of each token of a response."""
    ids = torch.tensor([[*prompt, *response]], dtype=torch.int64)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    every = torch.log_softmax(logits / temperature, -1)
    return every.gather(1, ids[0, len(prompt) :, None])[:, 0]


def plain_logprobs_of_group(
    model: Any, group: Mapping[str, Any], temperature: float = 1.0
) -> list[Tensor]:
    """Return the log-probabilities of each sample of a group."""
    return [
        plain_logprobs(model, group["prompt_ids"], group["response_ids"][start:end], temperature)
        for start, end in itertools.pairwise(group["response_offsets"])
    ]
