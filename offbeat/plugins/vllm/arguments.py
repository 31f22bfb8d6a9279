"""Translates a recipe's ``generator`` section to the arguments of vLLM's engine."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

from offbeat.config.base import of_kind
from offbeat.environments.tokenizer import find_tokenizer_files
from offbeat.generators.spec import EngineSpec
from offbeat.plugins.vllm.coverage import read_coverage
from offbeat.plugins.vllm.errors import EngineArgsRefused
from offbeat.plugins.vllm.section import VllmGeneratorConfig
from offbeat.weight_sync.wire_format import find_wire_format

TRANSFER_BACKEND: Final = "offbeat_shm"
_EXTENSION: Final = "offbeat.plugins.vllm.worker_extension.WorkerExtension"
_OF_THE_ACTOR: Final = ("weight_transfer_config", "worker_extension_cls")
"""Arguments that the recipe may not set, because weight transfer and process cleanup need them."""


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the keyword arguments of ``AsyncEngineArgs``, except for the weight transfer."""
    config = of_kind(VllmGeneratorConfig, spec.generator)
    vllm = config.vllm
    return {
        "model": spec.model.path,
        "dtype": spec.model.dtype,
        "trust_remote_code": spec.model.trust_remote_code,
        "seed": spec.seed,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_sequences,
        "scheduling_policy": "priority",  # canaries before samples, then in order of arrival
        "tensor_parallel_size": vllm.tensor_parallel,
        "pipeline_parallel_size": vllm.pipeline_parallel,
        "enable_expert_parallel": vllm.expert_parallel,
        "distributed_executor_backend": "mp",
        # token ids in, token ids out: only stop strings need text
        "skip_tokenizer_init": not find_tokenizer_files(spec.model.path),
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": 0,  # pictures arrive processed
        "logprobs_mode": logprobs_mode(config),
        **_of_the_cpu_build(config),
        **_of_quantized_releases(spec),
        **vllm.engine_args,
        "worker_extension_cls": _EXTENSION,
    }


def _of_the_cpu_build(config: VllmGeneratorConfig) -> dict[str, Any]:
    # work-around: seeded_chunked_prefill
    return {"enable_chunked_prefill": False} if config.device == "cpu" else {}


def _of_quantized_releases(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of an engine that gets all its weights quantized, in releases.

    The files are not quantized, and vLLM would read them into float8 without scales. So the engine
    loads none of them.
    """
    if spec.quantize is None:
        return {}
    files = read_coverage(spec.model.path, spec.model.dtype).tensors
    tensors = ((name, shape) for name, (shape, _) in files.items())
    quantization = find_wire_format(spec.quantize).engine_config(tensors)
    return {"load_format": "dummy", "hf_overrides": {"quantization_config": quantization}}


def logprobs_mode(config: VllmGeneratorConfig) -> str:
    """Return the vLLM mode whose logprobs are of ``softmax(logits / temperature)``, untruncated.

    vLLM's raw logprobs are of temperature 1, before any filter. ``min_p``, ``top_k`` and ``top_p``
    cut its processed ones (vllm/v1/sample/sampler.py, 0.32). No mode fits another temperature
    together with a filter, so the config refuses that.
    """
    return "raw_logprobs" if config.sampling.temperature == 1 else "processed_logprobs"


def check_engine_args(given: Mapping[str, Any], known: Mapping[str, object]) -> None:
    """Raise unless every argument exists and may be set by the recipe.

    Args:
        given: ``generator.vllm.engine_args``.
        known: The fields of vLLM's ``AsyncEngineArgs``, by name.

    Raises:
        EngineArgsRefused: For the first argument that is unknown or reserved.
    """
    for name in given:
        if name in _OF_THE_ACTOR:
            raise EngineArgsRefused(name, "is set by this package", "Leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = (
                f"Did you mean {near[0]}?"
                if near
                else "See vllm serve --help=all, with underscores"
            )
            raise EngineArgsRefused(name, "is not an argument of this vLLM's AsyncEngineArgs", fix)


def collect_fields(arguments: type[Any]) -> dict[str, object]:
    """Return the fields of a dataclass by name."""
    return {field.name: field.type for field in dataclasses.fields(arguments)}
