"""Named activations of two trainers that should compute the same step, and how far apart each is.

Two steps whose losses agree may differ inside, and two that differ say nothing about where it began: the
first activation that is apart does.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.trainers.batches.packing import PackedRows

Activations = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Gap:
    """How far an activation is from the one that is right."""

    cosine: float  # of the two as vectors
    largest: float  # difference of an element, over the largest element that is right


@contextmanager
def recorded(model: nn.Module, patterns: Sequence[str]) -> Generator[Activations]:
    """Record what modules return in the block, under their names; several calls end to end.

    ``patterns``: names of modules, with wildcards. A module that is not called has no entry.
    """
    calls, found = dict[str, list[NDArray[np.float64]]](), Activations()

    def note(name: str, _: nn.Module, __: Any, returned: Any) -> None:
        made = returned if isinstance(returned, Tensor) else returned[0]
        calls.setdefault(name, []).append(made.detach().double().flatten().numpy())

    handles = [
        module.register_forward_hook(partial(note, name))
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        found.update({name: np.concatenate(each) for name, each in calls.items()})


def gaps(got: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, Gap]:
    """The gap of each activation, in the order in which they are computed.

    Raises:
        AssertionError: One of them is missing on a side, or has another number of elements.
    """
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return {name: _gap(name, got[name], right) for name, right in want.items()}


def first_apart(found: Mapping[str, Gap], bound: float) -> str:
    """Name of the first activation that is further apart than a bound; empty if none is."""
    return next((name for name, each in found.items() if not each.largest <= bound), "")


def _gap(name: str, got: NDArray[np.float64], want: NDArray[np.float64]) -> Gap:
    assert got.shape == want.shape, f"{name} has {got.size} elements, not {want.size}"
    lengths = float(np.linalg.norm(got) * np.linalg.norm(want))
    return Gap(float(got @ want) / lengths, float(np.abs(got - want).max() / np.abs(want).max()))


@contextmanager
def recorded_of_tokens(
    trainer: Any,
    layers: Mapping[str, nn.Module],
    heads: Mapping[str, nn.Module],
    flat: Callable[[str, Tensor], Tensor],
) -> Generator[Activations]:
    """Record what modules return where a wanted token is predicted, in the order of the tokens.

    So it is the same however a trainer packs a chunk into rows, pads them and divides them over ranks.

    Args:
        trainer: It makes the passes of one chunk in the block.
        layers: By the name of their entry, modules that return hidden states of all places.
        heads: Modules that return logits of the places that predict, in their order.
        flat: What a module returned, of its entry, as [places, width], whole.
    """
    calls, found = dict[str, list[Tensor]](), Activations()
    chunk, add = list[PackedRows](), trainer.passes.add_gradients

    def watched(microbatches: Sequence[PackedRows], *further: Any) -> None:
        chunk.extend(microbatches)
        add(microbatches, *further)

    def note(name: str, _: nn.Module, __: Any, returned: Any) -> None:
        made = returned if isinstance(returned, Tensor) else returned[0]
        calls.setdefault(name, []).append(flat(name, made.detach()).double())

    trainer.passes.add_gradients = watched
    handles = [
        module.register_forward_hook(partial(note, name))
        for name, module in (*layers.items(), *heads.items())
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        trainer.passes.add_gradients = add
    order = np.argsort(np.concatenate([each.source_N for each in chunk]))
    for name, made in calls.items():
        parts = [
            each[packed.which_N if name in heads else packed.predicts_U[packed.which_N]].numpy()
            for each, packed in zip(made, chunk, strict=True)
        ]
        found[name] = np.concatenate(parts)[order].ravel()
