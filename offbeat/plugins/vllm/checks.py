"""Checks vLLM and its engine arguments, for a recipe that uses it.

Modules that need vLLM are imported on use, because torch and transformers need seconds to import.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from offbeat.config.base import of_kind
from offbeat.config.limits import trainer_device, trainer_ranks
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.doors import is_installed
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.reshard.section import find_wire
from offbeat.plugins.vllm.section import VllmGeneratorConfig


def check_vllm(config: RunConfig) -> Iterator[Finding]:
    """Check the vLLM section. Import vLLM only if the recipe has arguments to look up."""
    from offbeat.plugins.vllm.errors import INSTALL
    from offbeat.plugins.vllm.lazy_import import vllm_version

    if not is_installed("vllm"):
        yield error("vllm", "is not installed in this Python", f"{INSTALL}.")
        return
    yield check_version(vllm_version())
    if given := of_kind(VllmGeneratorConfig, config.generator).vllm.engine_args:
        yield _arguments(given)


def check_version(version: str) -> Finding:
    """Return a warning for a version of vLLM that was never tested."""
    from offbeat.plugins.vllm.workarounds import TESTED, was_tested

    if was_tested(version):
        return ok("vllm", version)
    first, last = TESTED
    return warning(
        "vllm",
        f"{version} was never tested; {first} to {last} were",
        f"Install vllm {last}, or run tests/vllm_engine with this one.",
    )


def check_vllm_model(config: RunConfig) -> Iterator[Finding]:
    """Check that vLLM computes the model like the trainer. The model's files must be complete."""
    from offbeat.plugins.vllm.errors import PicturesUnserved, RopeDiffers
    from offbeat.plugins.vllm.rope import check_rope
    from offbeat.plugins.vllm.served_families import check_family

    try:
        check_rope(config.model.path, config.generator.max_model_len)
        check_family(config.model.path)
    except (RopeDiffers, PicturesUnserved) as refused:
        message, _, fix = str(refused).rpartition(". ")
        yield error("vllm", message, f"{fix}.")


def check_vllm_sync(config: RunConfig) -> Iterator[Finding]:
    """Report which weights vLLM's workers fetch in a reshard, as far as the recipe tells."""
    if trainer_ranks(config) == 1:
        yield ok(
            "weight sync",
            "a trainer of one rank sends whole tensors, once to each vLLM engine. Several ranks would "
            "send each vLLM worker only what this worker loads",
        )
        return
    if because := find_unrecorded_keys(config):
        yield warning(
            "weight sync",
            f"vLLM's layout is not recorded with {' and '.join(because)}: each engine makes "
            "whole tensors from the regions that it receives, which needs one more copy of the "
            "weights in its main memory",
            "Set sync.transport to object_store where that memory is short.",
        )
        return
    yield ok(
        "weight sync",
        "every vLLM worker records which regions its loader reads, and fetches them from the "
        "trainer ranks. If a layout cannot be recorded, the engine loads whole tensors and "
        "logs why (weights.whole_tensors)",
    )


def _arguments(given: Mapping[str, Any]) -> Finding:
    from offbeat.plugins.vllm.arguments import check_engine_args, collect_fields
    from offbeat.plugins.vllm.errors import INSTALL, EngineArgsRefused, VllmMissing
    from offbeat.plugins.vllm.lazy_import import load_library

    try:
        check_engine_args(given, collect_fields(load_library().AsyncEngineArgs))
    except EngineArgsRefused as refused:
        message = f"generator.vllm.engine_args.{refused.subject} {refused.problem}"
        return error("vllm", message, f"{refused.fix}.")
    except VllmMissing as missing:
        return error("vllm", f"cannot be imported: {missing.detail}", f"{INSTALL}.")
    return ok("vllm arguments", ", ".join(f"{name}={value}" for name, value in given.items()))


_ELSEWHERE: Final = {
    "model": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "max_model_len": "generator.max_model_len",
    "max_num_seqs": "generator.max_sequences",
    "tensor_parallel_size": "generator.vllm.tensor_parallel",
    "pipeline_parallel_size": "generator.vllm.pipeline_parallel",
    "enable_expert_parallel": "generator.vllm.expert_parallel",
    "data_parallel_size": "generator.engines",
}
"""Arguments of vLLM that have their own key in a recipe."""

_SEVERAL_MACHINES: Final = frozenset(
    {"distributed_executor_backend", "master_addr", "master_port", "nnodes", "node_rank"}
)
"""Arguments of vLLM that spread an engine over machines."""

_LEAST_TEMPERATURE: Final = 0.01
"""Lowest temperature of vLLM's ``SamplingParams``. It raises lower ones to this, and logs that."""

_LORA: Final = frozenset(
    {
        "default_mm_loras",
        "enable_lora",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "fully_sharded_loras",
        "lora_dtype",
        "lora_modules",  # only of ``vllm serve``, but users look for it
        "lora_target_modules",
        "max_cpu_loras",
        "max_lora_cls_labels",
        "max_lora_rank",
        "max_loras",
        "specialize_active_lora",
    }
)
"""Arguments of vLLM's own LoRA path."""


def vllm_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings of a recipe with vLLM engines that contradict each other."""
    generator = of_kind(VllmGeneratorConfig, config.generator)
    yield from _releases_set_the_quantization(config, generator)
    yield from _workers_record_what_they_receive(config, generator)
    yield from _arguments_have_one_place(generator)
    yield from _an_engine_is_on_one_machine(generator)
    yield from _adapters_are_added_to_the_weights(generator)
    yield from _devices_of_an_engine_are_reserved(generator)
    yield from _logprobs_are_of_the_whole_distribution(generator)


def _releases_set_the_quantization(
    config: RunConfig, generator: VllmGeneratorConfig
) -> Iterator[Clash]:
    scheme = config.sync.quantize
    for key in ("quantization", "hf_overrides", "load_format"):
        if scheme is not None and key in generator.vllm.engine_args:
            yield Clash(
                ("sync.quantize", "generator.vllm.engine_args"),
                f"sync.quantize={scheme} sets {key} of vLLM, which generator.vllm.engine_args sets too",
                f"Leave generator.vllm.engine_args.{key} out, or sync.quantize.",
            )


def find_unrecorded_keys(config: RunConfig) -> list[str]:
    """Return the keys of a recipe that prevent recording the layout of vLLM's workers."""
    vllm = of_kind(VllmGeneratorConfig, config.generator).vllm
    is_set = {
        "generator.vllm.pipeline_parallel": vllm.pipeline_parallel > 1,
        "generator.vllm.expert_parallel": vllm.expert_parallel,
        "generator.vllm.engine_args.quantization": bool(vllm.engine_args.get("quantization")),
        "sync.quantize": config.sync.quantize is not None,
    }
    return [key for key in is_set if is_set[key]]


def _workers_record_what_they_receive(
    config: RunConfig, generator: VllmGeneratorConfig
) -> Iterator[Clash]:
    """Yield engines with workers that cannot receive, because their layout is not recorded."""
    wire, devices = find_wire(config.sync), (trainer_device(config.trainer), generator.device)
    if wire == "tcp" or not all(each.startswith("cuda") for each in devices):
        return
    for key in find_unrecorded_keys(config):
        yield Clash(
            ("sync.wire", key),
            f"sync.wire={wire} ends in the workers of an engine, which receive only with a recorded layout, "
            f"but {key} has none",
            "Set sync.wire to tcp.",
        )


def _arguments_have_one_place(generator: VllmGeneratorConfig) -> Iterator[Clash]:
    for name, value in generator.vllm.engine_args.items():
        if name in _ELSEWHERE:
            yield Clash(
                ("generator.vllm.engine_args", _ELSEWHERE[name]),
                f"generator.vllm.engine_args.{name}={value} has a separate key",
                f"Set {_ELSEWHERE[name]} instead.",
            )


def _an_engine_is_on_one_machine(generator: VllmGeneratorConfig) -> Iterator[Clash]:
    for name, value in generator.vllm.engine_args.items():
        if name in _SEVERAL_MACHINES and value != "mp":
            yield Clash(
                ("generator.vllm.engine_args",),
                f"generator.vllm.engine_args.{name}={value} does not fit the weight sync, which hands weights to "
                "the workers of an engine through memory of one machine",
                f"Leave {name} out, and set generator.vllm.tensor_parallel and pipeline_parallel so that an "
                "engine fits one machine.",
            )


def _adapters_are_added_to_the_weights(generator: VllmGeneratorConfig) -> Iterator[Clash]:
    for name, value in generator.vllm.engine_args.items():
        if name in _LORA:
            yield Clash(
                ("generator.vllm.engine_args", "trainer.lora"),
                f"generator.vllm.engine_args.{name}={value} belongs to vLLM's LoRA support, "
                "which stays off: engines add adapters to the weights they loaded "
                "(docs/lora.md)",
                f"Leave {name} out: trainer.lora trains adapters and serves them.",
            )


def _devices_of_an_engine_are_reserved(generator: VllmGeneratorConfig) -> Iterator[Clash]:
    devices = generator.vllm.tensor_parallel * generator.vllm.pipeline_parallel
    shares_one = devices == 1 and 0 < generator.gpus < 1  # with another engine or the trainer
    if generator.device != "cpu" and generator.gpus not in (0, devices) and not shares_one:
        yield Clash(
            (
                "generator.gpus",
                "generator.vllm.tensor_parallel",
                "generator.vllm.pipeline_parallel",
            ),
            f"generator.gpus={generator.gpus:g} does not fit an engine of {devices} devices",
            f"Set generator.gpus to {devices}.",
        )


def _logprobs_are_of_the_whole_distribution(generator: VllmGeneratorConfig) -> Iterator[Clash]:
    sampling = generator.sampling
    if sampling.temperature < _LEAST_TEMPERATURE:
        yield Clash(
            ("generator.sampling.temperature", "generator.backend"),
            f"generator.sampling.temperature={sampling.temperature:g} is below {_LEAST_TEMPERATURE:g}, "
            "at which vLLM samples instead, so the loss would use a different temperature",
            f"Set it to {_LEAST_TEMPERATURE:g} or more.",
        )
    if sampling.temperature == 1:
        return
    for name, value, neutral in (
        ("top_p", sampling.top_p, 1),
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0),
    ):
        if value != neutral:
            yield Clash(
                (
                    f"generator.sampling.{name}",
                    "generator.sampling.temperature",
                    "generator.backend",
                ),
                f"generator.sampling.{name}={value:g} with generator.sampling.temperature="
                f"{sampling.temperature:g} has no usable logprobs in vLLM: they are either of temperature "
                f"1, or of the distribution that {name} has cut",
                f"Set {name} to {neutral} or the temperature to 1.",
            )
