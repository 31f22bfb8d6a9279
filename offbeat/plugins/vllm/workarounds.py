"""Registry of all work-arounds for vLLM. Each has one entry, and this is the only list.

An entry names the versions in which the problem was last confirmed.
``tests/vllm_engine/test_workarounds.py`` confirms each on the installed vLLM. When upstream fixes a
problem, its test fails, and the entry is removed together with its code.
"""

from dataclasses import dataclass
from typing import Final

from offbeat.messages.versions import is_within


@dataclass(frozen=True, slots=True)
class Workaround:
    """A problem of vLLM, and the code here that avoids it."""

    name: str  # marks its code: ``# work-around: name``
    problem: str  # behaviour of vLLM
    instead: str  # behaviour of this package
    upstream: str  # its place, by file and function
    versions: str  # major.minor pairs in which it was seen, ``first..last``

    def applies_to(self, version: str) -> bool:
        """Return whether ``version`` is in the range.

        It always is for a custom build, because its version cannot be parsed.
        """
        first, _, last = self.versions.partition("..")
        return is_within(version, first, last or first)


TESTED: Final = ("0.31", "0.32")
"""First and last minor version of vLLM with which ``tests/vllm_engine`` passed."""

PAUSE_SLEEP: Final = Workaround(
    "pause_sleep",
    "pause_generation sleeps 20 ms after the scheduler has paused, for the order of events only",
    "the engine core's own pause is called",
    "vllm/v1/engine/async_llm.py, AsyncLLM.pause_generation",
    "0.31..0.33",  # 0.33: by its source
)
NO_ACCELERATOR: Final = Workaround(
    "no_accelerator_to_synchronize",
    "update_weights synchronizes an accelerator, which raises where there is none",
    "a worker on CPU receives without it",
    "vllm/distributed/weight_transfer/base.py, WeightTransferEngine.update_weights",
    "0.31..0.32",
)
ABORT_UPDATE: Final = Workaround(
    "abort_update",
    "an update that raises leaves layers on the meta device; the next forward ends the engine",
    "WorkerExtension.ws_abort puts their tensors back and forgets the update",
    "vllm/model_executor/model_loader/reload/layerwise.py, initialize_layerwise_reload",
    "0.31..0.32",
)
SILENT_COVERAGE: Final = Workaround(
    "silent_coverage",
    "a tensor missing from an update is not an error: it stays stale, or becomes unwritten memory",
    "a release is compared with the checkpoint's tensors before anything moves",
    "vllm/model_executor/model_loader/reload/layerwise.py, finalize_layerwise_processing",
    "0.31..0.32",
)
TIED_HEAD: Final = Workaround(
    "tied_head",
    "on CPU an output head that is the embedding is packed once, and not again by an update: "
    "logits are computed with the first weights for ever",
    "it is packed anew after its embedding was loaded",
    "vllm/model_executor/model_loader/reload/layerwise.py, finalize_layerwise_processing",
    "0.31..0.32",
)
PACKED_EXPERTS: Final = Workaround(
    "packed_experts",
    "on CPU experts are packed for their kernel when they are loaded first, and not again by an update: "
    "the kernel then reads them in a layout that it does not have",
    "an update loads them without their kernel, as the first load does, and gives it back",
    "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py, "
    "UnquantizedFusedMoEMethod._setup_kernel",
    "0.31..0.32",
)
SURVIVING_CORE: Final = Workaround(
    "surviving_core",
    "the engine core and its workers outlive an owner that is killed",
    "a process beside the owner watches it, owner_watch",
    "vllm/v1/engine/core.py, EngineCoreProc.run_engine_core",
    "0.31..0.32",
)
SEEDED_CHUNKED_PREFILL: Final = Workaround(
    "seeded_chunked_prefill",
    "a seeded prompt that is prefilled in pieces rewinds its generator, which a CPU generator refuses: "
    "the engine core ends",
    "on CPU prompts are prefilled whole, unless engine_args say otherwise",
    "vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._bookkeeping_sync",
    "0.31..0.32",
)
UNLABELLED_TOKENS: Final = Workaround(
    "unlabelled_tokens",
    "outputs do not say which weights sampled a token",
    "LabelledLLM says it, by the time at which the core sent the token",
    "vllm/v1/engine/output_processor.py, RequestState._new_completion_output",
    "0.31..0.31",
)

WORKAROUNDS: Final = (
    PAUSE_SLEEP,
    NO_ACCELERATOR,
    ABORT_UPDATE,
    SILENT_COVERAGE,
    TIED_HEAD,
    PACKED_EXPERTS,
    SURVIVING_CORE,
    SEEDED_CHUNKED_PREFILL,
    UNLABELLED_TOKENS,
)


def was_tested(version: str) -> bool:
    """Return whether the tests passed with this minor version of vLLM, or it is a custom build."""
    return is_within(version, *TESTED)
