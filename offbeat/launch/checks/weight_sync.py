"""Check of how weights reach the engines."""

from collections.abc import Iterator

from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, ok, warning


def check_weight_sync(config: RunConfig) -> Iterator[Finding]:
    """Say what a release is cut into, and what engines make of it."""
    if config.sync.delta and config.generator.has_engines:
        yield _delta(config)
    if config.sync.transport != "reshard" or not config.generator.has_engines:
        return
    if config.generator.backend == "vllm":
        yield warning(
            "weight sync",
            "vLLM loads whole tensors: each engine makes them of the regions that it receives, which "
            "takes one more copy of the weights in its main memory",
            "Set sync.transport to gloo or object_store where that memory is short.",
        )
    elif config.generator.backend == "embedded":
        yield ok(
            "weight sync",
            "every trainer rank sends the regions that it holds, and engines load them",
        )


def _delta(config: RunConfig) -> Finding:
    """Say what deltas need, and warn where they can hardly save a byte."""
    served = config.sync.wire_dtype or config.model.dtype
    if "float32" in served and config.sync.quantize is None:
        return warning(
            "weight sync",
            "sync.delta=true with float32 weights: a step changes nearly every one of them, and a release "
            "with many changes is sent whole",
            "Set sync.wire_dtype to bfloat16, or leave sync.delta out.",
        )
    return ok(
        "weight sync",
        "engines that serve the release before get what changed since, the others the full release; each "
        "engine and the trainer keep one more copy of the weights in main memory",
    )
