"""Defines section ``generator.vllm`` of a recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field

from offbeat.config.base import Config


class VllmConfig(Config):
    """The vLLM engines, with ``generator.backend: vllm``."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices each layer of an engine is split over. More fit wider models and answer sooner,
    and exchange activations in every layer: several smaller engines sample more."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages the layers of an engine are split into. More fit deeper models with little
    traffic, at a longer time per token."""

    expert_parallel: bool = False
    """Split experts, not each expert's matrices, over the devices of an engine. On suits models
    of many small experts, and is as slow as the device with the busiest experts."""

    pause: Literal["keep", "wait", "abort"] = "keep"
    """Treatment of running samples at a weight sync. keep: they go on afterwards, partly under old
    weights; wait: they end first on the old weights, which delays the sync; abort: they start
    anew on the new ones, which loses their work."""

    kv: Literal["recompute", "keep"] = "recompute"
    """Keys and values at a weight sync. recompute: made anew by the new weights, as a fresh
    prompt would be; keep: those of the old weights stay, which costs nothing and shifts the
    logprobs."""

    call_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Time each call of a weight sync into the engine may take; then the engine is STALE. Raise
    it for large models; a hung call is noticed later."""

    heartbeat_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Time the engine's process may take to answer between two decode steps before it counts as
    hung. Raise it where compiling or long prompts stall it; a hung engine is replaced later."""

    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``, by their Python names. They reach whatever has no key here, and
    are vLLM's own: their names are checked when an engine starts, and a new version of vLLM may rename one."""
