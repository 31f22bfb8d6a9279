"""Checks that parallel sizes fit a model, and finds fitting sizes near a recipe's. Pure.

Each broken rule names the key to change. A rule names one size, but another rule may refuse the
size that it suggests. So the search covers all sizes together, and every rule checks each choice.
"""

import math
from collections.abc import Iterator
from itertools import product

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.errors import UnsupportedLayout
from offbeat.plugins.megatron.layout import make_grid
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid


def broken_rules(
    architecture: Architecture, grid: ModelGrid, *, sequence_parallel: bool
) -> Iterator[UnsupportedLayout]:
    """Yield the settings that keep the ranks of a grid from holding or training a model."""
    yield from _divisibility(architecture, grid)
    yield from _stages(architecture, grid)
    if architecture.experts and grid.tensor > 1 and not sequence_parallel:
        want = "true: the library trains experts with tensor parallelism in no other way"
        yield UnsupportedLayout("trainer.sequence_parallel", "false", want)
    if sequence_parallel and grid.tensor == 1:
        want = "false, or trainer.tensor_parallel to 2 or more: its ranks share the tokens"
        yield UnsupportedLayout("trainer.sequence_parallel", "true", want)


def _divisibility(a: Architecture, grid: ModelGrid) -> Iterator[UnsupportedLayout]:
    if a.groups % grid.tensor and grid.tensor % a.groups:
        want = f"a divisor or a multiple of the model's {a.groups} key-value heads"
        yield UnsupportedLayout("trainer.tensor_parallel", str(grid.tensor), want)
    elif grid.tensor > a.groups and a.heads % grid.tensor == 0:
        rows = (a.heads + 2 * a.groups) * a.head_dim
        if rows % grid.tensor:
            want = f"a divisor of the model's {rows} rows of queries, keys and values"
            yield UnsupportedLayout("trainer.tensor_parallel", str(grid.tensor), want)
    rules = [
        ("trainer.tensor_parallel", grid.tensor, "heads", a.heads),
        ("trainer.expert_parallel", grid.expert, "experts", a.experts or 1),
    ]
    tensor, within = "trainer.tensor_parallel", "trainer.expert_tensor_parallel"
    if a.experts:
        columns = "columns of an expert"
        rules.append((within, grid.expert_tensor_ranks, columns, a.expert_intermediate))
        rules.append((tensor, grid.tensor, "columns of the shared expert", a.shared_intermediate))
    else:
        rules.append((within, grid.expert_tensor_ranks, "experts", 1))
    if a.has_dense_layers:
        rules.append((tensor, grid.tensor, "columns of the MLP", a.intermediate))
    for setting, ranks, what, count in rules:
        if count % ranks:
            yield UnsupportedLayout(setting, str(ranks), f"a divisor of the model's {count} {what}")


def _stages(a: Architecture, grid: ModelGrid) -> Iterator[UnsupportedLayout]:
    if grid.stages and sum(grid.stages) != a.layers:
        got = " + ".join(map(str, grid.stages))
        want = f"numbers that add up to the model's {a.layers} layers"
        yield UnsupportedLayout("trainer.layers_per_stage", got, want)
        return
    if not grid.stages and a.layers % grid.pipeline:
        want = (
            f"a divisor of the model's {a.layers} layers, or trainer.layers_per_stage to "
            f"{even_stages(a.layers, grid.pipeline)}"
        )
        if grid.pipeline > a.layers:
            want = f"a divisor of the model's {a.layers} layers"
        yield UnsupportedLayout("trainer.pipeline_parallel", str(grid.pipeline), want)
        return
    if len(grid.list_layers(0, a.layers)) < a.deep_layers:
        want = (
            f"fewer stages: the first has to have the {a.deep_layers} layers to whose outputs "
            "features of pictures are added"
        )
        yield UnsupportedLayout("trainer.pipeline_parallel", str(grid.pipeline), want)


def even_stages(layers: int, stages: int) -> list[int]:
    """Return layers per stage, which differ by at most one: fewer in the first and last stages."""
    counts = [layers // stages] * stages
    middle = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
    for stage in middle[: layers % stages]:
        counts[stage] += 1
    return counts


def fitting_sizes(a: Architecture, trainer: MegatronTrainerConfig) -> dict[str, str]:
    """Return the keys to change and their values, as a recipe writes them. The nearest sizes win.

    Data and context parallelism stay unchanged, because every model fits them. No size is 0, so at
    least one choice fits: one rank for each copy.
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
        _divisors(a.heads),
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
        grid = make_grid(trainer)
    except LayoutRefused:
        return False
    return not any(broken_rules(a, grid, sequence_parallel=trainer.sequence_parallel))


def _distance(given: MegatronTrainerConfig, other: MegatronTrainerConfig) -> tuple[float, int]:
    """Return by which factors the sizes differ, and how many settings differ."""
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
