"""Records what a vLLM worker's loader puts where, on a model without memory like the worker's own.

The layers of a served model are packed for the kernels and hold no trace of the checkpoint's layout.
A second model of the same configuration, on the device without memory, is as it was before loading:
its ``load_weights`` runs once there, for this worker's part of every layer. What decodes is not touched.
"""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.utils import initialize_model

from offbeat.weight_sync.region import Shape
from offbeat.weight_sync.reshard.recorder import EngineRecording, Loader, record


def record_worker(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's VllmConfig
    checkpoint: Mapping[str, tuple[Shape, torch.dtype]],
) -> EngineRecording:
    """Record the loader of a worker whose own model has been loaded in this process.

    The parallel groups must exist. vLLM keeps one set of rotary tables a process: made here first,
    they would be without memory for every later model.

    Args:
        vllm_config: The worker's configuration; it is not changed.
        checkpoint: Shape and dtype of every tensor of the model's files.

    Raises:
        LayoutNotRecorded: The loader writes a parameter other than by copies, an element twice, or
            leaves one unwritten.
    """
    model = _without_memory(vllm_config)
    load: Loader = model.load_weights  # type: ignore[assignment] -- every model of vLLM has it
    return record(load, dict(model.named_parameters()), checkpoint)


def _without_memory(vllm_config: Any) -> nn.Module:  # noqa: ANN401 -- vLLM's VllmConfig
    """Return a model of this configuration without memory.

    Attention layers enter themselves by name into the configuration, so it gets one of its own.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device("meta"):
            return initialize_model(config)
    finally:
        torch.set_default_dtype(dtype)
