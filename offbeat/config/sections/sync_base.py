"""Keys of section ``sync`` that every transport has.

A transport's plug-in derives its section from this one, and a recipe's models load plug-ins. So
this module must not load a transport.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.doors import find_plugins

if TYPE_CHECKING:
    WireFormatName = str | None
else:
    _NAMES = tuple(find_plugins("wire_format"))
    WireFormatName = Literal[_NAMES] | None if _NAMES else None


class BaseSyncConfig(Config):
    """Keys of every transport."""

    ranks_send: ClassVar[bool] = False
    """Whether each trainer rank sends what it holds; else rank 0 gathers whole tensors and sends them."""

    mode: Literal["keep", "drain", "abort_stale"] = "keep"
    """What happens to running samples at a sync. keep: they continue under the new weights. drain:
    engines finish them first, and idle until the slowest sample is done. abort_stale: as keep, but
    cancel samples that would be too old."""

    interval: Annotated[int, Field(ge=1)] = 1
    """Steps between two syncs. It must be at most `sampler.max_staleness` plus 1."""

    chunk_mib: Annotated[float, Field(gt=0)] = 64.0
    """MiB per transfer chunk. A larger tensor is one chunk. Lower it if a rank runs out of memory
    while it publishes."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for an engine to load the weights. A slower engine is STALE: it serves nothing until
    a later sync is complete. Raise this for large models on slow links."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype in which floating-point weights are sent and served. null: as in the trainer. 16 bits
    halve the transfer of a float32 trainer."""

    keep_float32: tuple[str, ...] = ("e_score_correction_bias", "expert_bias", "router_bias")
    """Name endings of tensors that `wire_dtype` does not round. By default: the biases with which
    routers choose experts."""

    quantize: WireFormatName = None
    """Format of matrices in vLLM engines. fp8_block: float8_e4m3fn with a scale per block of 128 x
    128, rounded once by the trainer, as in DeepSeek-V3's files. null: `wire_dtype`."""

    adapter: Literal["separate", "merged"] = "separate"
    """Content of a release with `trainer.lora`. separate: only adapters, which each engine adds to
    its model. merged: the whole model."""

    canary_interval: Annotated[int, Field(ge=0)] = 4
    """The first release and then one in this many has a canary: next-token distributions of the
    trainer, which an engine must reproduce before it serves the release. 0: no canaries."""

    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Nats by which an engine may differ in a canary before it is replaced. null: 0.02, for 16-bit
    weights 0.25, for 8-bit kernels 1.5. The effective limit is 5 times the engine's gap on its
    first release if that is larger, capped at twice this value. Raise it if healthy engines are
    replaced."""

    delta: bool = False
    """In addition, send each release as its difference from the previous one. This saves bytes if
    few values change (16 bits, small learning rates). Each engine, and with object_store also rank
    0, keeps one more copy of the weights in main memory. Not with `wire` cuda_ipc or nccl."""

    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Nats per token by which engine and trainer may differ on on-policy samples before the run
    ends. null: only warn, at 0.02 or more (with 16-bit weights 0.1, with `quantize` 0.4)."""

    def sends_regions(self, ranks: int) -> bool:
        """Return whether releases of ``ranks`` trainer ranks are cut into regions of tensors."""
        del ranks
        return False
