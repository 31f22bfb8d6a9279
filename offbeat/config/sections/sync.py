"""Defines section ``sync`` of a recipe."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from offbeat.config.base import Config, default_choice

SENDERS_AT_ONCE: Final = 4
"""Senders of a reshard that an engine asks at the same time; their buckets share its link."""

BUCKETS_IN_FLIGHT: Final = 2
"""Buckets of one sender on their way to one engine: one is checked while the next one arrives."""

BUCKETS_AT_ONCE: Final = SENDERS_AT_ONCE * BUCKETS_IN_FLIGHT


class _Sync(Config):
    ranks_send: ClassVar[bool] = False
    """Whether each trainer rank sends what it holds; else rank 0 gathers whole tensors and sends them."""

    mode: Literal["keep", "drain", "abort_stale"] = "keep"
    """keep: running samples continue under the new weights. drain: engines finish them first and
    idle meanwhile. abort_stale: as keep, but cancel samples that would be too old."""

    interval: Annotated[int, Field(ge=1)] = 1
    """Steps between two syncs. `sampler.max_staleness` must be at least this minus 1."""

    chunk_mib: Annotated[float, Field(gt=0)] = 64.0
    """Size of a transfer chunk in MiB; a larger tensor is one chunk. Lower it if a rank runs out of
    memory while it publishes."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time for an engine to take the weights, after which it is STALE. Raise it for large models on
    slow links."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype in which floating-point weights travel and are served. null: as in the trainer. 16 bits
    halve the transfer of a float32 trainer."""

    keep_float32: tuple[str, ...] = ("e_score_correction_bias", "expert_bias", "router_bias")
    """Name endings of tensors that `wire_dtype` does not round: the biases by which routers choose
    experts."""

    quantize: Literal["fp8_block"] | None = None
    """Form in which vLLM engines hold matrices. fp8_block: float8_e4m3fn with a scale per block of
    128 x 128, rounded once by the trainer, as in DeepSeek-V3's files. null: `wire_dtype`."""

    adapter: Literal["separate", "merged"] = "separate"
    """Content of a release with `trainer.lora`. separate: only adapters, which each engine adds to
    its model. merged: the whole model."""

    canary_interval: Annotated[int, Field(ge=0)] = 4
    """Releases per canary: next-token distributions of the trainer that an engine must reproduce
    before it serves. The first release has one. 0: none."""

    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Nats by which an engine may differ in a canary; beyond, it is replaced. null: 0.02, for
    16-bit weights 0.25, for 8-bit kernels 1.5; or 5 times the gap of the engine's first release if
    that is more, up to twice this number. Raise it if healthy engines are replaced."""

    delta: bool = False
    """Also send a release as the change since the last one. Saves bytes where few values change (16
    bits, small learning rates). Each engine, and with object_store rank 0, keeps one more copy of
    the weights in main memory. Not with a device `wire`."""

    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Nats per token by which engine and trainer may differ on on-policy samples; beyond, the run
    ends. null: a warning from 0.02, with 16-bit weights 0.1, with `quantize` 0.4."""


class ObjectStoreSyncConfig(_Sync):
    """Send through Ray's object store: shared memory on one machine, one copy per machine on a cluster."""

    transport: Literal["object_store"] = "object_store"
    """Path of the bytes."""


class ReshardSyncConfig(_Sync):
    """Send each rank's shards directly; nothing is gathered, and no rank sends the whole model."""

    ranks_send = True

    transport: Literal["reshard"] = "reshard"
    """Path of the bytes."""

    slowest_mib_s: Annotated[float, Field(gt=0)] = 100.0
    """MiB/s below which a link counts as broken: a chunk may take its size over this, and ``slack_s``. Lower it
    for slow networks; a broken link is then noticed later."""

    slack_s: Annotated[float, Field(gt=0)] = 5.0
    """Time that any wait for a peer may take, whatever the size. Raise it for machines that stall; a
    lost engine is then left out later."""

    wire: Literal["tcp", "cuda_ipc", "nccl"] = "tcp"
    """Wire of the buckets. tcp: main memory, any machines. cuda_ipc: device memory shared with
    engines on the same GPU. nccl: between devices. Both need one more device copy of what is sent
    or received, and have not run on a GPU."""


SyncConfig = Annotated[
    ObjectStoreSyncConfig | ReshardSyncConfig,
    Field(discriminator="transport"),
    default_choice("transport", "object_store"),
]


def wire_of(sync: SyncConfig) -> Literal["tcp", "cuda_ipc", "nccl"]:
    """Return the wire that carries buckets, or tcp for transports without buckets."""
    return sync.wire if isinstance(sync, ReshardSyncConfig) else "tcp"


def sends_regions(sync: SyncConfig, ranks: int) -> bool:
    """Return whether releases of so many trainer ranks are cut into regions of tensors.

    A single rank sends whole tensors over tcp; over the other wires what a worker of an engine needs.
    """
    return sync.ranks_send and (ranks > 1 or wire_of(sync) != "tcp")
