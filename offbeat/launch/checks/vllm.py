"""Checks vLLM and its engine arguments, for a recipe that uses it.

Modules that need vLLM are imported on use: they import torch and transformers, which takes seconds.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.config.run import RunConfig
from offbeat.messages.finding import Finding, error, ok, warning


def check_vllm(config: RunConfig) -> Iterator[Finding]:
    """Check the vLLM section; import vLLM only when the recipe has arguments to look up."""
    if config.generator.backend != "vllm":
        return
    from offbeat.generators.vllm.errors import INSTALL
    from offbeat.generators.vllm.lazy_import import vllm_version

    if importlib.util.find_spec("vllm") is None:
        yield error("vllm", "is not installed in this Python", f"{INSTALL}.")
        return
    yield check_version(vllm_version())
    if given := config.generator.vllm.engine_args:
        yield _arguments(given)


def check_version(version: str) -> Finding:
    """Return a warning for a version of vLLM that was never tested."""
    from offbeat.generators.vllm.workarounds import TESTED, was_tested

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
    if config.generator.backend != "vllm":
        return
    from offbeat.generators.vllm.errors import PicturesUnserved, RopeDiffers
    from offbeat.generators.vllm.rope import check_rope
    from offbeat.generators.vllm.served_families import check_family

    try:
        check_rope(config.model.path, config.generator.max_model_len)
        check_family(config.model.path)
    except (RopeDiffers, PicturesUnserved) as refused:
        message, _, fix = str(refused).rpartition(". ")
        yield error("vllm", message, f"{fix}.")


def _arguments(given: Mapping[str, Any]) -> Finding:
    from offbeat.generators.vllm.arguments import check_engine_args, fields_of
    from offbeat.generators.vllm.errors import INSTALL, EngineArgsRefused, VllmMissing
    from offbeat.generators.vllm.lazy_import import load_library

    try:
        check_engine_args(given, fields_of(load_library().AsyncEngineArgs))
    except EngineArgsRefused as refused:
        message = f"generator.vllm.engine_args.{refused.subject} {refused.problem}"
        return error("vllm", message, f"{refused.fix}.")
    except VllmMissing as missing:
        return error("vllm", f"cannot be imported: {missing.detail}", f"{INSTALL}.")
    return ok("vllm arguments", ", ".join(f"{name}={value}" for name, value in given.items()))
