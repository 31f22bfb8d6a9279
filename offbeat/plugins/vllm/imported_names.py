"""The vLLM names that the actor's process uses. Importing this module needs seconds."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ruff: noqa: F401 -- names of vLLM; ``lazy_import`` returns this module
# vllm lives in an environment of its own (docs/vllm.md).

from vllm import SamplingParams, TokensPrompt
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import mm_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
