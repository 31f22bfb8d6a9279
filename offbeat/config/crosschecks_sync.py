"""Finds settings of the weight sync that cannot work, and says what to set instead."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import lora_of, trainer_device, trainer_resources
from offbeat.config.run import RunConfig
from offbeat.config.sections.sync import BUCKETS_AT_ONCE, wire_of


def sync_clashes(config: RunConfig) -> Iterator[Clash]:
    """A transfer that breaks must be over, and tried again, before the sync is."""
    sync = config.sync
    if sync.transport == "object_store":
        return
    limit_s = BUCKETS_AT_ONCE * sync.chunk_mib / sync.slowest_mib_s + sync.slack_s
    if sync.deadline_s < 4 * limit_s:
        yield Clash(
            ("sync.deadline_s", "sync.slack_s", "sync.slowest_mib_s", "sync.chunk_mib"),
            f"sync.deadline_s={sync.deadline_s:g} would be over before a lost engine is noticed and the "
            f"others are sent to again: that takes up to four times the {limit_s:g} s a chunk may take",
            f"Set sync.deadline_s to {4 * limit_s:g} or more, or sync.slack_s lower.",
        )


def wire_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield releases that the engines could not take."""
    yield from _adapter_clashes(config)
    yield from _quantize_clashes(config)
    if config.sync.ranks_send and lora_of(config) is not None:
        yield Clash(
            ("sync.transport", "trainer.lora"),
            "sync.transport=reshard sends full weights from the ranks that hold them, and trainer.lora "
            "trains adapters, which are small or have to be merged first",
            "Set sync.transport to object_store.",
        )
    yield from _delta_clashes(config)
    yield from _device_clashes(config)
    # Embedded engines hold the type of the recipe's model, and take no other.
    wire, served = config.sync.wire_dtype, config.model.dtype
    if config.generator.backend == "embedded" and wire not in (None, served):
        yield Clash(
            ("sync.wire_dtype", "model.dtype", "generator.backend"),
            f"sync.wire_dtype={wire} does not fit generator.backend=embedded, which serves "
            f"model.dtype={served}",
            f"Set sync.wire_dtype to null, or model.dtype to {wire}.",
        )


def _adapter_clashes(config: RunConfig) -> Iterator[Clash]:
    """A release can only be merged from adapters."""
    if config.sync.adapter == "merged" and lora_of(config) is None:
        yield Clash(
            ("sync.adapter", "trainer.lora"),
            "sync.adapter=merged has nothing to merge: without trainer.lora, every release is the "
            "whole model",
            "Leave sync.adapter out, or set trainer.lora.",
        )


def _quantize_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield quantized releases that no engine of the recipe takes."""
    scheme, generator = config.sync.quantize, config.generator
    if scheme is None:
        return
    served = config.sync.wire_dtype or config.model.dtype
    is_16_bit = served in ("bfloat16", "float16")
    has_no_quantized = generator.backend in ("embedded", "none")
    if has_no_quantized:
        and_wire = "" if is_16_bit else " and sync.wire_dtype to bfloat16"
        yield Clash(
            ("sync.quantize", "generator.backend"),
            f"sync.quantize={scheme} does not fit generator.backend={generator.backend}, which computes with "
            "no quantized weights",
            f"Leave sync.quantize out, or set generator.backend to vllm{and_wire}.",
        )
    if lora_of(config) is not None:
        yield Clash(
            ("sync.quantize", "trainer.lora"),
            f"sync.quantize={scheme} has no effect on adapters, which trainer.lora sends unrounded",
            "Leave sync.quantize out, or train all weights.",
        )
    if not has_no_quantized and not is_16_bit:
        yield Clash(
            ("sync.quantize", "sync.wire_dtype", "model.dtype"),
            f"sync.quantize={scheme} needs engines that compute in 16 bits, and they serve {served}",
            "Set sync.wire_dtype to bfloat16.",
        )
    if generator.backend == "vllm":
        for key in ("quantization", "hf_overrides", "load_format"):
            if key in generator.vllm.engine_args:
                yield Clash(
                    ("sync.quantize", "generator.vllm.engine_args"),
                    f"sync.quantize={scheme} sets {key} of vLLM, which generator.vllm.engine_args sets too",
                    f"Leave generator.vllm.engine_args.{key} out, or sync.quantize.",
                )


def _delta_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield releases that have no delta."""
    if not config.sync.delta:
        return
    if (wire := wire_of(config.sync)) != "tcp":
        yield Clash(
            ("sync.delta", "sync.wire"),
            f"sync.delta=true does not fit sync.wire={wire}: changes are encoded in main memory, and "
            "each wire of devices keeps memory of fixed sizes",
            "Leave sync.delta out, or set sync.wire to tcp.",
        )
    if lora_of(config) is not None:
        yield Clash(
            ("sync.delta", "trainer.lora"),
            "sync.delta=true saves nothing with trainer.lora: a step changes nearly every value of an "
            "adapter, and a large part of the matrices that it is merged into",
            "Leave sync.delta out.",
        )


def _device_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield wires between devices that ranks and engines do not have."""
    wire, generator = wire_of(config.sync), config.generator
    if wire == "tcp":
        return
    if not generator.has_engines:
        yield Clash(
            ("sync.wire", "generator.backend"),
            f"sync.wire={wire} has no effect with generator.backend={generator.backend}, which has no "
            "engines",
            "Leave sync.wire out.",
        )
        return
    served = "cpu" if generator.backend == "stub" else generator.device
    devices = {"trainer": trainer_device(config.trainer), "generator": served}
    for section, device in devices.items():
        if not device.startswith("cuda"):
            yield Clash(
                ("sync.wire", f"{section}.device"),
                f"sync.wire={wire} carries device memory, and {section}.device={device}",
                f"Set sync.wire to tcp, or {section}.device to cuda.",
            )
            return
    yield from _sharing_clashes(config, wire)
    yield from _recording_clashes(config, wire)


def _sharing_clashes(config: RunConfig, wire: str) -> Iterator[Clash]:
    """Yield GPUs that are shared where the wire needs one each, or are not where it needs one.

    Ray shows a process only the GPUs that it reserves, and fractions of one GPU to several.
    """
    ranks, generator = trainer_resources(config), config.generator
    reserved = sum(each.gpus for each in ranks) + generator.gpus * generator.engines
    if wire == "cuda_ipc" and reserved > 1:
        yield Clash(
            ("sync.wire", "trainer.gpus", "generator.gpus"),
            f"sync.wire=cuda_ipc opens memory of a GPU that both processes see, and {len(ranks)} trainer "
            f"ranks and {generator.engines} engines that reserve {reserved:g} GPUs together do not share one",
            "Set sync.wire to nccl."
            if len(ranks) > 1
            else "Lower trainer.gpus and generator.gpus until all of them together are 1 or less, or set "
            "sync.wire to nccl.",
        )
    if wire == "nccl" and min(generator.gpus, *(each.gpus for each in ranks)) < 1:
        yield Clash(
            ("sync.wire", "trainer.gpus", "generator.gpus"),
            "sync.wire=nccl needs a GPU of its own for every trainer rank and engine, and fractions of "
            "trainer.gpus or generator.gpus may share one",
            "Set both to 1 or more, or sync.wire to cuda_ipc for one GPU, or to tcp.",
        )


def _recording_clashes(config: RunConfig, wire: str) -> Iterator[Clash]:
    """Yield vLLM engines whose workers cannot receive: only those whose layout is recorded do."""
    if config.generator.backend != "vllm":
        return
    vllm = config.generator.vllm
    unrecorded = {
        "generator.vllm.pipeline_parallel": vllm.pipeline_parallel > 1,
        "generator.vllm.expert_parallel": vllm.expert_parallel,
        "generator.vllm.engine_args": bool(vllm.engine_args.get("quantization")),
        "sync.quantize": config.sync.quantize is not None,
    }
    for key in (key for key, is_set in unrecorded.items() if is_set):
        yield Clash(
            ("sync.wire", key),
            f"sync.wire={wire} ends in the workers of an engine, which receive only with a recorded layout, "
            f"and {key} has none",
            "Set sync.wire to tcp.",
        )
