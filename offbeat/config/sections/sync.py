"""Defines section ``sync`` of a recipe."""

from typing import Annotated, Final, Literal

from pydantic import Field

from offbeat.config.base import Config, default_choice

SENDERS_AT_ONCE: Final = 4
"""Senders of a reshard that an engine asks at the same time; their buckets share its link."""

BUCKETS_IN_FLIGHT: Final = 2
"""Buckets of one sender on their way to one engine: one is checked while the next one arrives."""

BUCKETS_AT_ONCE: Final = SENDERS_AT_ONCE * BUCKETS_IN_FLIGHT


class _Sync(Config):
    mode: Literal["keep", "drain", "abort_stale"] = "keep"
    """keep: running samples go on under the new weights; drain: engines finish them first and idle meanwhile;
    abort_stale: as keep, but samples that would be too old for their step are cancelled, which saves compute."""

    interval: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two syncs. More steps spend less time on syncs, but samples are older:
    `sampler.max_staleness` has to be at least this minus 1."""

    chunk_mib: Annotated[float, Field(gt=0)] = 64.0
    """Size of one transfer chunk in MiB; one tensor larger than this is a chunk of its own. Larger chunks cost
    fewer calls and more memory on both sides; lower it if a rank runs out of memory while it publishes."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time an engine gets to take the weights before it is left behind as STALE. Raise it for large models on
    slow links; a longer deadline notices a hung engine later."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type in which floating-point weights travel and are served; None: as the trainer holds them. 16 bits halve
    the transfer of a float32 trainer, and engines then sample from rounded weights."""

    keep_float32: tuple[str, ...] = ("e_score_correction_bias", "expert_bias", "router_bias")
    """Ends of the names of tensors that ``wire_dtype`` does not round to 16 bits: the biases by which routers choose
    experts. Add a tensor whose rounding changes decisions; each one travels at twice the size."""

    quantize: Literal["fp8_block"] | None = None
    """Form in which vLLM engines hold and compute the matrices of layers. fp8_block: float8_e4m3fn with a scale for
    each block of 128 x 128, rounded once by the trainer, as DeepSeek-V3's files have it: half the bytes of bfloat16,
    and logprobs further from the trainer's; None: as ``wire_dtype`` says."""

    adapter: Literal["separate", "merged"] = "separate"
    """Content of a release when `trainer.lora` is set. separate: the adapters alone, which each engine adds to the
    model it loaded, in its own memory; merged: the whole model with the adapters added, which spares engines that
    work at the bytes of a full release."""

    canary_interval: Annotated[int, Field(ge=0)] = 4
    """Releases from one canary to the next: next-token distributions of the trainer that an engine has to
    reproduce before it serves the release; a trainer's first release has one. 1 checks each release at a forward
    pass of trainer and engine, a larger number costs less and notices a wrong engine later; 0: none."""

    canary_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Nats by which an engine's answer to a canary may differ from the trainer's; more replaces the engine. Raise it
    if healthy engines are replaced, as routers of experts choose others on tiny differences. None: 0.02, with 16-bit
    weights 0.25, with kernels that round to 8 bits 1.5; 5 times the gap of an engine's first release
    if that is more, up to twice the number."""

    delta: bool = False
    """Whether a release also travels as what changed since the one before it, to engines that serve that one,
    which rebuild its bytes exactly. Set it where few values change, as in 16 bits at small learning rates, and
    the network is slow: each engine keeps one more copy of the weights in main memory, and so does the trainer's
    rank 0 with object_store. Over reshard each rank compares what it holds; not with ``wire`` of devices."""

    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Nats per token by which the logprobs of engine and trainer may differ on samples drawn under the weights
    being trained; more ends the run. Set it to stop early rather than train on wrong ratios; None: a warning
    from 0.02, with 16-bit weights from 0.1, with ``quantize`` from 0.4."""


class ObjectStoreSyncConfig(_Sync):
    """Sends through Ray's object store: shared memory on one machine, one copy per machine on a cluster."""

    transport: Literal["object_store"] = "object_store"
    """Path of the bytes."""


class _OverTcpSync(_Sync):
    slowest_mib_s: Annotated[float, Field(gt=0)] = 100.0
    """MiB/s below which a link counts as broken: a chunk may take its size over this, and ``slack_s``. Lower it
    for slow networks; a broken link is then noticed later."""

    slack_s: Annotated[float, Field(gt=0)] = 5.0
    """Time that any wait for a peer may take, whatever the size. Raise it for machines that stall, as it delays
    how soon a lost engine is left out."""


class GlooSyncConfig(_OverTcpSync):
    """Broadcasts from the trainer to all engines at once, over TCP."""

    transport: Literal["gloo"] = "gloo"
    """Path of the bytes."""


class ReshardSyncConfig(_OverTcpSync):
    """Sends each rank's shards directly; nothing is gathered, and no rank sends the whole model."""

    transport: Literal["reshard"] = "reshard"
    """Path of the bytes."""

    wire: Literal["tcp", "cuda_ipc", "nccl"] = "tcp"
    """Wire that carries the buckets. tcp: main memory, between any machines; cuda_ipc: device memory that engines
    open where it lies, for ranks and engines that share one GPU; nccl: from device to device, for GPUs of their
    own. Both keep what a rank sends or receives once more in device memory; neither has been run on a GPU."""


SyncConfig = Annotated[
    ObjectStoreSyncConfig | GlooSyncConfig | ReshardSyncConfig,
    Field(discriminator="transport"),
    default_choice("transport", "object_store"),
]


def wire_of(sync: SyncConfig) -> Literal["tcp", "cuda_ipc", "nccl"]:
    """Return what carries the buckets of a reshard; tcp for transports that have none."""
    return sync.wire if sync.transport == "reshard" else "tcp"


def sends_regions(sync: SyncConfig, ranks: int) -> bool:
    """Return whether releases of so many trainer ranks are cut into regions of tensors.

    A single rank sends whole tensors over tcp; over the other wires what a worker of an engine needs.
    """
    return sync.transport == "reshard" and (ranks > 1 or sync.wire != "tcp")
