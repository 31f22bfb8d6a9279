"""A step and a forward pass the plain way: float64 on the CPU, one row at a time, without packing."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

RATE: Final = 10.0
OPTIMIZER: Final[Mapping[str, Any]] = {"learning_rate": RATE, "eps": 1.0, "max_grad_norm": None}
"""With a large eps, an update is proportional to its gradient; it is far above the rounding of float32."""
CLIP: Final = 0.2


class Step(NamedTuple):
    """Groups of random tokens, and the advantage of each of their samples."""

    groups: list[dict[str, NDArray[Any]]]
    advantages: list[tuple[float, ...]]


def make_step(vocabulary: int, groups: int = 4, seed: int = 0) -> Step:
    """Draw groups of four samples of uneven lengths; a fifth of the tokens is not trained."""
    rng = np.random.default_rng(seed)
    made = list[dict[str, NDArray[Any]]]()
    for _ in range(groups):
        lengths = rng.integers(4, 40, 4)
        total = int(lengths.sum())
        logprobs = rng.normal(-np.log(vocabulary), 0.3, (2, total)).astype(np.float32)
        made.append(
            {
                "prompt_ids": rng.integers(0, vocabulary, int(rng.integers(3, 20)), np.int32),
                "response_ids": rng.integers(0, vocabulary, total, np.int32),
                "response_offsets": np.cumsum([0, *lengths]).astype(np.int64),
                "loss_mask": rng.random(total) >= 0.2,
                "generation_logprobs": logprobs[0],
                "policy_logprobs": logprobs[1],
                "weight_versions": np.zeros(total, np.int32),
                "rewards": rng.random(len(lengths)).astype(np.float32),
            }
        )
    return Step(made, [tuple(rng.normal(size=4).tolist()) for _ in made])


def load_in_float64(path: Path) -> PreTrainedModel:
    """Load a model on the CPU, with plain attention and a loop over its experts."""
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **kinds)


def read_saved_weights(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Save a model and return its weights by the names in its files, where experts are apart."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def response_logprobs(model: PreTrainedModel, prompt: Any, response: Any) -> Tensor:
    """Return the log-probability of each token of one response: [N] float64."""
    ids = torch.tensor([*prompt, *response])
    logits = model(input_ids=ids[None]).logits[0].double()
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return rows.gather(-1, ids[len(prompt) :, None]).squeeze(-1)


def group_logprobs(model: PreTrainedModel, group: Mapping[str, NDArray[Any]]) -> Tensor:
    """Return the log-probabilities of all samples of a group, end to end."""
    offsets = group["response_offsets"]
    ends = itertools.pairwise(offsets)
    responses = [group["response_ids"][slice(*each)] for each in ends]
    prompt = group["prompt_ids"]
    return torch.cat([response_logprobs(model, prompt, each) for each in responses])


def train_step(model: PreTrainedModel, step: Step) -> None:
    """Apply one step of AdamW to the mean of the clipped policy gradient over all trained tokens."""
    terms = list[Tensor]()
    for group, advantages in zip(*step, strict=True):
        logprobs, mask = group_logprobs(model, group), torch.tensor(group["loss_mask"])
        ratio = torch.exp(logprobs - torch.tensor(group["policy_logprobs"], dtype=torch.float64))
        counts = torch.tensor(np.diff(group["response_offsets"]))
        weight = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(counts)
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
        terms.append(-torch.minimum(ratio * weight, bounded * weight)[mask])
    torch.cat(terms).mean().backward()
    torch.optim.AdamW(model.parameters(), lr=RATE, eps=1.0, weight_decay=0.0).step()


def worst_update_error(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> float:
    """Return the largest error of any update, relative to the largest update of its tensor."""
    assert want.keys() <= got.keys()
    errors = list[float]()
    for name, tensor in want.items():
        start = before[name].double()
        wanted = tensor.detach() - start
        error = got[name].detach().cpu().double() - start - wanted
        errors.append(float(error.abs().max() / wanted.abs().max()))
    return max(errors)
