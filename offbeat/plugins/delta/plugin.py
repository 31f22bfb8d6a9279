"""Delta releases: the interface for the core."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from offbeat.messages.finding import Finding, ok, warning
from offbeat.weight_sync.delta_plugin import DeltaPlugin

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.plugins.delta.kept_release import KeptBase
    from offbeat.plugins.delta.shard_deltas import ShardDeltas
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.manifest import Bytes, Manifest


class Deltas(DeltaPlugin):
    """Sends changed words, and rebuilds chunks from them."""

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Report the requirements of deltas, and warn if they can hardly save a byte."""
        yield check_delta_settings(config)

    def make_packer(self) -> "ShardDeltas":
        """Return a packer of a trainer rank's releases and their deltas."""
        from offbeat.plugins.delta.shard_deltas import ShardDeltas

        return ShardDeltas()

    def keep_release(self, engine: str) -> "KeptBase":
        """Return a holder of the release that an engine serves, initially empty."""
        from offbeat.plugins.delta.kept_release import KeptBase

        return KeptBase(engine)

    def rebuild_buckets(
        self,
        epoch: int,
        release: "Manifest",
        buckets: Sequence[int],
        base: "Sequence[BucketMemory]",
        parts: "Sequence[BucketMemory]",
    ) -> "tuple[Bytes, ...]":
        """Return verified buckets of a release, rebuilt from the base's buckets and changes.

        Raises:
            TransferRefused: The changes belong to different buckets.
        """
        from offbeat.plugins.delta.shard_deltas import rebuilt_buckets

        return rebuilt_buckets(epoch, release, buckets, base, parts)


def check_delta_settings(config: "RunConfig") -> Finding:
    """Report the requirements of deltas, and warn if they can hardly save a byte."""
    served = config.sync.wire_dtype or config.model.dtype
    if "float32" in served and config.sync.quantize is None:
        return warning(
            "weight sync",
            "sync.delta=true with float32 weights: a step changes nearly every one of them, and a release "
            "with many changes is sent whole",
            f"Set {_sixteen_bits(config)}, or leave sync.delta out.",
        )
    if config.trainer.backend != "stub" and config.trainer.optimizer.rounding == "stochastic":
        return warning(
            "weight sync",
            "sync.delta=true with trainer.optimizer.rounding=stochastic: a weight that hardly moved may be "
            "rounded the other way in the next release, so each step changes about a third of the values, "
            "whatever the learning rate (rounded to the nearest, about 1 % at 1e-6), and a delta saves less",
            "Leave sync.delta out, or set trainer.optimizer.rounding to nearest; sync/full_* tells which "
            "releases were sent whole.",
        )
    return ok(
        "weight sync",
        "engines that serve the release before get what changed since, the others the full release; each "
        "engine and the trainer keep one more copy of the weights in main memory",
    )


def _sixteen_bits(config: "RunConfig") -> str:
    """Return the setting with which engines serve bfloat16 weights.

    Embedded engines serve the type of the trainer's model. Engines of plug-ins may serve another
    type.
    """
    if config.generator.backend == "embedded":
        unset = "" if config.sync.wire_dtype is None else " and sync.wire_dtype to null"
        return f"model.dtype to bfloat16{unset} (embedded engines serve the type of the model)"
    if config.sync.wire_dtype is None:
        return "sync.wire_dtype or model.dtype to bfloat16"
    return "sync.wire_dtype to bfloat16"


DELTA: Final = Deltas()
