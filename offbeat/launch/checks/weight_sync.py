"""Check of how weights reach the engines."""

from collections.abc import Iterator

from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, ok, warning


def check_weight_sync(config: RunConfig) -> Iterator[Finding]:
    """Say which engines load the regions of a reshard, and which need whole tensors made of them."""
    if config.sync.transport != "reshard" or not config.generator.has_engines:
        return
    if config.generator.backend == "vllm":
        yield warning(
            "weight sync",
            "vLLM loads whole tensors: each engine makes them of the regions that it receives, which "
            "takes one more copy of the weights in its main memory",
            "Set sync.transport to gloo or object_store where that memory is short.",
        )
    else:
        yield ok(
            "weight sync",
            "every trainer rank sends the regions that it holds, and engines load them",
        )
