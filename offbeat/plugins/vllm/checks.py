"""Checks vLLM and its engine arguments, for a recipe that uses it.

Modules that need vLLM are imported on use, because torch and transformers need seconds to import.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.config.base import of_kind
from offbeat.config.limits import trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.doors import is_installed
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.vllm.clashes import find_unrecorded_keys
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
            "send each of its workers what that loads",
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
