"""Weight releases, and the engines' reports about the weights that they serve."""

import enum
from typing import Any, NamedTuple

import msgspec


class EngineState(msgspec.Struct, frozen=True):
    """State of one engine. If ``version`` is None, it has no weights of this run."""

    name: str
    incarnation: str  # changes with every process
    version: int | None
    digest: str | None
    running: int  # samples being decoded
    waiting: int  # requests not started
    busy_s: float  # seconds of decoding since start
    tokens: int  # tokens generated since start
    pid: int = 0  # its process
    cpu_s: float = 0.0  # CPU seconds of the process since start, without its children


class CanaryAnswer(NamedTuple):
    """Greedy next token of an engine for one prompt of a canary."""

    token: int
    logprob: float  # natural, at temperature 1


class Canary(msgspec.Struct, frozen=True):
    """Next-token distributions after a few fixed prompts, computed by the trainer from one release.

    An engine with these weights computes the same logprob for each prompt's best token. For each
    distribution, the most probable tokens are kept, in descending order.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]  # natural, at temperature 1
    tolerance: float  # nats between the trainer's and the engine's
    is_fixed: bool = False  # whether an engine may not raise the tolerance (``CanaryChecks``)


class WeightsAck(msgspec.Struct, frozen=True):
    """Acknowledgement that an engine has verified and now serves these weights."""

    engine: str
    incarnation: str
    epoch: int
    version: int
    digest: str
    transfer_s: float  # time to receive and verify
    pause_s: float  # time that decoding was paused
    busy_s: float = 0.0  # seconds of decoding since start
    tokens: int = 0  # tokens generated since start
    canary_gap: float | None = None  # nats from the trainer's canary; None: the release has none
    cpu_s: float = 0.0  # CPU seconds of the process since start, without its children


class FullReason(enum.StrEnum):
    """Reason why an engine gets a full release although ``sync.delta`` is set."""

    NO_BASE = "no_base"  # the trainer's process has published nothing since it started or rewound
    TOO_LARGE = "too_large"  # the changes are more than half of the full release
    UNKNOWN_BASE = "unknown_base"  # the controller does not know that the engine serves the base
    REFUSED = "refused"  # the engine serves a different release than the controller assumed


class WeightDelta(msgspec.Struct, frozen=True):
    """Changes that turn the previous release into a release."""

    base: str  # digest of the release to which it applies
    digest: str  # of the delta's manifest and content
    manifest: Any  # offbeat.weight_sync.manifest.Manifest without tensors: sizes and digests
    chunks: tuple[
        Any, ...
    ]  # handles, one per chunk of the full release or as the transport divides them
    nbytes: int
    changed: float  # share of the words of the full release


class WeightRelease(msgspec.Struct, frozen=True):
    """One version of the weights, ready to be loaded by generators.

    ``chunks`` are opaque handles, object references in production, in the order of the manifest. A
    reference to the release keeps its bytes in memory, so a restarted engine can catch up without
    the trainer. Without a manifest, the release stands for the weights with which engines were
    created.
    """

    version: int
    digest: str  # of manifest and content together
    manifest: Any  # offbeat.weight_sync.manifest.Manifest
    chunks: tuple[Any, ...]
    nbytes: int
    canary: Canary | None = None  # the canary of the manifest
    delta: WeightDelta | None = None  # for engines that serve its base
    full_reason: FullReason | None = None  # why the delta is missing, if ``sync.delta`` is set

    @property
    def handles(self) -> tuple[Any, ...]:
        """Return the handles that an engine loads: the delta's chunks, or else the release's."""
        return self.chunks if self.delta is None else self.delta.chunks

    @property
    def loading(self) -> str:
        """Return the name of the call that loads this release, for errors."""
        return "serve loaded weights" if self.manifest is None else "weight sync"

    def without_handles(self) -> "WeightRelease":
        """Return this release without handles, to be sent next to the handles."""
        delta = None if self.delta is None else msgspec.structs.replace(self.delta, chunks=())
        return msgspec.structs.replace(self, chunks=(), delta=delta)
