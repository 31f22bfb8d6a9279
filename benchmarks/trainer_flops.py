"""Computes how much arithmetic a step needs, and how fast a device could do it at best."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.trainer_cases import Groups
from offbeat.trainers.batches.packing import PADDING, PackedRows, visible_in
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.flops import known_peak
from offbeat.trainers.torch.model import linear_to_pair_ratio, vocabulary


class Load(NamedTuple):
    """The part of a step that reaches the model, over all its microbatches."""

    tokens: int  # padding left out; a shared prompt once a row
    places: int  # whose logits are made
    pairs: int  # of tokens of which one attends to the other

    @classmethod
    def of(cls, microbatches: Sequence[PackedRows]) -> "Load":
        """Return the load of packed rows."""
        tokens = places = pairs = 0
        for packed in microbatches:
            real_RT = packed.segments_RT != PADDING
            tokens += int(real_RT.sum())
            places += len(packed.predicts_U)
            pairs += int(visible_in(packed)[real_RT].sum())
        return cls(tokens, places, pairs)


def load_of(
    model: PreTrainedModel, groups: Groups, max_tokens: int, *, shared_prompt: bool
) -> Load:
    """The load of one step of these groups, cut as the trainer cuts them."""
    cutting = MicrobatchPlanner(
        max_tokens, shared_prompt, linear_to_pair_ratio(model), vocabulary(model)
    )
    _, microbatches = cutting.cut(groups, only_trained=True)
    return Load.of(microbatches)


def step_flops(model: PreTrainedModel, load: Load) -> float:
    """Floating-point operations of a forward and a backward pass.

    ``6 W_body tokens + 6 W_head places + 12 layers heads head_dim pairs``: each weight of a matrix
    is one multiplication and one addition a token forward and twice that backward; of a pair there
    is one for the score and one for the value, in every dimension of every head.
    """
    body, head = _matrices(model)
    config = model.config
    pair = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return (
        6 * sum(each.weight.numel() for each in body) * load.tokens
        + 6 * head.weight.numel() * load.places
        + pair * load.pairs
    )


def bare_matmul_flop_s(model: PreTrainedModel, load: Load, repeats: int = 3) -> float:
    """FLOP/s of nothing but the products of the model's matrices, in its type, on this device.

    Each shape with as many rows as a step has: forward, and both products of backward. On a CPU the
    seconds are those of CPU time, as ``Turn.cpu_s``.
    """
    timed, spent_s, done = dict[tuple[int, int, int], float](), 0.0, 0.0
    for rows, into, out in _shapes(model, load):
        shape = (rows, into, out)
        if shape not in timed:
            timed[shape] = min(_products_s(model, *shape) for _ in range(repeats))
        spent_s += timed[shape]
        done += 6 * rows * into * out
    return done / spent_s


def known_peak_flop_s(device: torch.device, dtype: str) -> float | None:
    """Return the maker's figure; None where the trainer does not have it."""
    return known_peak(device, getattr(torch, dtype))


def _matrices(model: PreTrainedModel) -> tuple[list[nn.Linear], nn.Linear]:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)  # noqa: S101 -- of the models of this benchmark
    body = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    return body, head


def _shapes(model: PreTrainedModel, load: Load) -> Iterator[tuple[int, int, int]]:
    body, head = _matrices(model)
    for each in body:
        yield load.tokens, each.in_features, each.out_features
    yield load.places, head.in_features, head.out_features


def _products_s(model: PreTrainedModel, rows: int, into: int, out: int) -> float:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=model.dtype, device=model.device)

    x, weight, gradient = random(rows, into), random(out, into), random(rows, out)

    def products() -> None:
        torch.mm(x, weight.T)
        torch.mm(gradient, weight)
        torch.mm(gradient.T, x)

    on_cpu = model.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    products()
    if not on_cpu:
        torch.cuda.synchronize(model.device)
    began = clock()
    products()
    if not on_cpu:
        torch.cuda.synchronize(model.device)
    return clock() - began
