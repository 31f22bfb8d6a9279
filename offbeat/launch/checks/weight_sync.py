"""Check of how weights reach the engines."""

from collections.abc import Iterator

from offbeat.config.limits import trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import VllmGeneratorConfig
from offbeat.config.sections.vllm import VllmConfig
from offbeat.messages.finding import Finding, ok, warning


def check_weight_sync(config: RunConfig) -> Iterator[Finding]:
    """Say what a release is cut into, and what engines make of it."""
    if config.sync.delta and config.generator.has_engines:
        yield _delta(config)
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


def _delta(config: RunConfig) -> Finding:
    """Say what deltas need, and warn where they can hardly save a byte."""
    served = config.sync.wire_dtype or config.model.dtype
    if "float32" in served and config.sync.quantize is None:
        return warning(
            "weight sync",
            "sync.delta=true with float32 weights: a step changes nearly every one of them, and a release "
            "with many changes is sent whole",
            f"Set {_sixteen_bits(config)}, or leave sync.delta out.",
        )
    if config.trainer.backend != "stub" and config.trainer.optimizer.rounding == "stochastic":
        return warning(
            "weight sync",
            "sync.delta=true with trainer.optimizer.rounding=stochastic: a weight that hardly moved may be "
            "rounded the other way in the next release, so each step changes about a third of the values, "
            "whatever the learning rate (rounded to the nearest, about 1 % at 1e-6), and a delta saves less",
            "Leave sync.delta out, or set trainer.optimizer.rounding to nearest; sync/full_* tells which "
            "releases were sent whole.",
        )
    return ok(
        "weight sync",
        "engines that serve the release before get what changed since, the others the full release; each "
        "engine and the trainer keep one more copy of the weights in main memory",
    )


def _sixteen_bits(config: RunConfig) -> str:
    """Return the setting with which engines serve bfloat16 weights.

    Embedded engines serve the type of the trainer's model; vLLM may serve another.
    """
    if config.generator.backend == "embedded":
        unset = "" if config.sync.wire_dtype is None else " and sync.wire_dtype to null"
        return f"model.dtype to bfloat16{unset} (embedded engines serve the type of the model)"
    if config.sync.wire_dtype is None:
        return "sync.wire_dtype or model.dtype to bfloat16"
    return "sync.wire_dtype to bfloat16"
