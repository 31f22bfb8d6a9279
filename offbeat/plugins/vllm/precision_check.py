"""Checks that every tensor of a model can be sent in the format that vLLM engines hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from offbeat.config.base import of_kind
from offbeat.config.run import RunConfig
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.float8.precision import (
    FP8_BLOCK,
    MatrixCuts,
    PrecisionRefused,
    Refusal,
    RefusedPair,
    find_refused_pairs,
    find_scheme,
    is_quantized,
)
from offbeat.plugins.vllm.section import VllmGeneratorConfig

_SUBJECT: Final = "precision"


def check_precision(config: RunConfig) -> list[Finding]:
    """Return one error that names every refused tensor, or how many matrices are quantized.

    The model's files must be complete.
    """
    generator = of_kind(VllmGeneratorConfig, config.generator)
    from offbeat.plugins.vllm.coverage import read_coverage

    settings = _settings(Path(config.model.path))
    files = read_coverage(config.model.path, config.model.dtype).tensors
    tensors = [(name, shape, kind) for name, (shape, kind) in files.items()]
    where, scheme = _engine_scheme(config, generator, settings)
    engine = _engine_cuts(generator, settings)
    pairs = find_refused_pairs(
        tensors, config.model.dtype, scheme, engine=engine, senders=_sender_cuts(config)
    )
    if scheme == FP8_BLOCK and config.sync.quantize is None and not pairs:
        pairs = tuple(
            RefusedPair(name, config.model.dtype, scheme, "is sent only with sync.quantize")
            for name, shape, _ in tensors
            if is_quantized(name, shape)
        )
    if pairs:
        return [error(_SUBJECT, str(PrecisionRefused(pairs)), _fix(config, where, scheme, pairs))]
    if not scheme:
        return []
    count = sum(is_quantized(name, shape) for name, shape, _ in tensors)
    if not count:
        text = f"{scheme} knows none of the {len(tensors)} tensors of this model as a matrix of a layer"
        return [error(_SUBJECT, text, f"Leave {where} out: every tensor would be sent unchanged.")]
    findings = [ok(_SUBJECT, f"{count} of {len(tensors)} tensors are sent as {scheme}")]
    if generator.device == "cpu":
        findings.append(
            warning(
                _SUBJECT,
                f"vLLM's CPU build computes {scheme} only on processors with AMX; its engines "
                "do not start on others",
                "Leave sync.quantize out where the processor has none.",
            )
        )
    return findings


def _engine_scheme(
    config: RunConfig, generator: VllmGeneratorConfig, settings: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the key that quantizes the engines' weights, and the scheme, empty if none does."""
    if config.sync.quantize is not None:
        return "sync.quantize", config.sync.quantize
    given = generator.vllm.engine_args
    overrides = given.get("hf_overrides")
    if isinstance(overrides, dict):
        inner = cast("dict[str, Any]", overrides).get("quantization_config")
        if scheme := find_scheme(inner):
            return "generator.vllm.engine_args.hf_overrides", scheme
    if given.get("quantization"):
        return "generator.vllm.engine_args.quantization", str(given["quantization"])
    return "model.path", find_scheme(settings.get("quantization_config"))


def _engine_cuts(generator: VllmGeneratorConfig, settings: Mapping[str, Any]) -> MatrixCuts:
    vllm = generator.vllm
    text = settings.get("text_config")
    inner = cast("dict[str, Any]", text) if isinstance(text, dict) else settings
    heads = inner.get("num_key_value_heads") or inner.get("num_attention_heads") or 0
    expert = 1 if vllm.expert_parallel else vllm.tensor_parallel
    return MatrixCuts(tensor=vllm.tensor_parallel, expert=expert, key_value_heads=int(heads))


def _sender_cuts(config: RunConfig) -> MatrixCuts | None:
    trainer = config.trainer
    if not config.sync.ranks_send:
        return None
    shards = trainer.data_parallel if trainer.backend == "torch" else 1
    if trainer.backend == "stub":
        return None
    return MatrixCuts(tensor=trainer.tensor_parallel, expert=trainer.ranks_of_expert, shards=shards)


def _fix(config: RunConfig, where: str, scheme: str, pairs: tuple[RefusedPair, ...]) -> str:
    if where == "model.path" and scheme:
        return (
            "Point model.path at the unquantized model; sync.quantize=fp8_block makes blocks of it."
        )
    if config.sync.quantize is None:
        return f"Leave {where} out; sync.quantize=fp8_block is the scheme that releases can have."
    if all(each.refusal is Refusal.TRAINER_CUT for each in pairs):
        return "Set sync.transport to object_store, which quantizes whole matrices."
    if of_kind(VllmGeneratorConfig, config.generator).vllm.tensor_parallel == 1:
        return "Leave sync.quantize out."  # whole matrices are the largest parts
    return "Leave sync.quantize out, or choose generator.vllm.tensor_parallel so that parts end with blocks."


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the model's config. ``check`` has read it before."""
    return cast("dict[str, Any]", json.loads((folder / "config.json").read_bytes()))
