"""Rules by which parallel sizes fit a model; each broken one names the key to change. Pure."""

from collections.abc import Iterator

from offbeat.trainers.megatron.architecture import Architecture
from offbeat.trainers.megatron.errors import UnsupportedLayout
from offbeat.weight_sync.grid import ModelGrid


def broken_rules(
    architecture: Architecture, grid: ModelGrid, *, sequence_parallel: bool
) -> Iterator[UnsupportedLayout]:
    """Yield the settings under which the ranks of a grid cannot hold or train a model."""
    yield from _divisibility(architecture, grid)
    yield from _stages(architecture, grid)
    if architecture.experts and grid.tensor > 1 and not sequence_parallel:
        want = "true: the library trains experts with tensor parallelism in no other way"
        yield UnsupportedLayout("trainer.sequence_parallel", "false", want)
    if sequence_parallel and grid.tensor == 1:
        want = "false, or trainer.tensor_parallel to 2 or more: its ranks share the tokens"
        yield UnsupportedLayout("trainer.sequence_parallel", "true", want)


def _divisibility(a: Architecture, grid: ModelGrid) -> Iterator[UnsupportedLayout]:
    rules = [
        ("trainer.tensor_parallel", grid.tensor, "key-value heads", a.groups),
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
    if len(grid.layers_of(0, a.layers)) < a.deep_layers:
        want = (
            f"fewer stages: the first has to have the {a.deep_layers} layers to whose outputs "
            "features of pictures are added"
        )
        yield UnsupportedLayout("trainer.pipeline_parallel", str(grid.pipeline), want)


def even_stages(layers: int, stages: int) -> list[int]:
    """Return numbers of layers that differ by one at most, fewer in the first and last stages."""
    counts = [layers // stages] * stages
    middle = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
    for stage in middle[: layers % stages]:
        counts[stage] += 1
    return counts
