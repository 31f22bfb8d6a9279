"""Parallel sizes that fit a model, as near to those of a recipe as there are. Pure.

The rules of ``layout_rules`` name one size each, and what one wants another may refuse. So a choice
is searched among all sizes together, and every rule is run on it.
"""

import math
from collections.abc import Iterator
from itertools import product

from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.megatron.architecture import Architecture
from offbeat.trainers.megatron.layout import grid_of
from offbeat.trainers.megatron.layout_rules import broken_rules, even_stages
from offbeat.weight_sync.errors import LayoutRefused


def fitting_sizes(a: Architecture, trainer: MegatronTrainerConfig) -> dict[str, str]:
    """Return the keys to change and what to, as a recipe writes it; the nearest sizes win.

    Data and context parallelism, which every model fits, stay. No size is 0, so one choice at least
    fits: that of one rank for each copy.
    """
    best = min(
        (each for each in _candidates(a, trainer) if _fits(a, each)),
        key=lambda each: _distance(trainer, each),
    )
    changed = {
        name: getattr(best, name)
        for name in type(best).model_fields
        if getattr(best, name) != getattr(trainer, name)
    }
    return {f"trainer.{name}": _written(value) for name, value in changed.items()}


def _candidates(a: Architecture, given: MegatronTrainerConfig) -> Iterator[MegatronTrainerConfig]:
    stages = [given.pipeline_parallel, *_divisors(a.layers)]
    choices = product(
        _divisors(math.gcd(a.heads, a.groups)),
        (each for each in stages if each <= a.layers),
        _divisors(a.experts or 1),
        _divisors(a.expert_intermediate if a.experts else 1),
    )
    for tensor, pipeline, expert, within in choices:
        kept = given.layers_per_stage
        if kept is not None and (len(kept) != pipeline or sum(kept) != a.layers):
            kept = tuple(even_stages(a.layers, pipeline))
        if kept is None and a.layers % pipeline:
            kept = tuple(even_stages(a.layers, pipeline))
        changes = {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "layers_per_stage": kept,
            "expert_parallel": expert,
            "expert_tensor_parallel": within,
            "sequence_parallel": tensor > 1 and (given.sequence_parallel or a.experts > 0),
        }
        yield given.model_copy(update=changes)


def _fits(a: Architecture, trainer: MegatronTrainerConfig) -> bool:
    try:
        grid = grid_of(trainer)
    except LayoutRefused:
        return False
    return not any(broken_rules(a, grid, sequence_parallel=trainer.sequence_parallel))


def _distance(given: MegatronTrainerConfig, other: MegatronTrainerConfig) -> tuple[float, int]:
    """Return by what factors the sizes differ, and how many settings do."""
    sizes = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    factors = [math.log(getattr(other, name) / getattr(given, name)) for name in sizes]
    others = ("layers_per_stage", "sequence_parallel")
    differing = sum(getattr(given, name) != getattr(other, name) for name in others)
    return sum(abs(each) for each in factors), differing + sum(each != 0 for each in factors)


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return str([*value])  # pyright: ignore[reportUnknownArgumentType] -- of a field
    return str(value).lower()
