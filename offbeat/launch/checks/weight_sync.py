"""Check of how weights reach the engines."""

from collections.abc import Iterator

from offbeat.config.limits import trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import VllmGeneratorConfig
from offbeat.config.sections.vllm import VllmConfig
from offbeat.messages.finding import Finding, ok, warning
from offbeat.weight_sync.delta_plugin import find_delta


def check_weight_sync(config: RunConfig) -> Iterator[Finding]:
    """Say what a release is cut into, and what engines make of it."""
    if config.sync.delta and config.generator.has_engines:
        yield from find_delta().check(config)
    if not config.sync.ranks_send or not config.generator.has_engines:
        return
    if isinstance(config.generator, VllmGeneratorConfig):
        yield _into_vllm(config, config.generator.vllm)
    elif config.generator.backend == "embedded":
        yield ok(
            "weight sync",
            "every trainer rank sends the regions that it holds, and engines load them",
        )


def _into_vllm(config: RunConfig, vllm: VllmConfig) -> Finding:
    """Report what vLLM's workers fetch of a reshard, as far as the recipe determines it."""
    if trainer_ranks(config) == 1:
        return ok(
            "weight sync",
            "a trainer of one rank sends whole tensors, once to each vLLM engine. Several ranks would "
            "send each of its workers what that loads",
        )
    axes = {
        "generator.vllm.pipeline_parallel": vllm.pipeline_parallel > 1,
        "generator.vllm.expert_parallel": vllm.expert_parallel,
        "generator.vllm.engine_args.quantization": bool(vllm.engine_args.get("quantization")),
        "sync.quantize": config.sync.quantize is not None,
    }
    if because := [key for key, is_set in axes.items() if is_set]:
        return warning(
            "weight sync",
            f"vLLM's layout is not recorded with {' and '.join(because)}: each engine makes whole "
            "tensors of the regions that it receives, which takes one more copy of the weights in its "
            "main memory",
            "Set sync.transport to object_store where that memory is short.",
        )
    return ok(
        "weight sync",
        "every vLLM worker records what its loader reads, and fetches that from the trainer ranks that "
        "hold it. An engine whose layout cannot be recorded takes whole tensors, and logs why "
        "(weights.whole_tensors)",
    )
