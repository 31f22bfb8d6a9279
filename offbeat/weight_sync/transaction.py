"""State machine of one replica's weight updates. Pure: no I/O, no clock, no tensors.

``Transaction`` checks its calls by the table ``MOVES``. docs/weight-sync.md shows this table.

Weights are staged, and take effect at the commit. Until then, and after an abort, the replica
serves its previous weights.

The controller (``syncing.py``, ``engines.py``, ``fleet.py``) owns the set of replicas, their
health, deadlines and retries. This module holds the state inside one engine.
"""

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from offbeat.weight_sync.errors import CoverageRefused, IllegalTransactionMove, TransferRefused
from offbeat.weight_sync.manifest import Manifest, release_digest
from offbeat.weight_sync.region import Region, union_elements


class TransactionPhase(enum.StrEnum):
    """Phase of a replica's transaction."""

    IDLE = "idle"  # never had weights of this run
    PREPARED = "prepared"
    TRANSFERRING = "transferring"
    VERIFYING = "verifying"  # all chunks arrived, as they were sent
    COMMITTED = "committed"  # serves a version


class TransactionEvent(enum.StrEnum):
    """Calls that move a transaction."""

    BEGIN = "begin"
    CHUNK = "a chunk"
    VERIFY = "verify"
    COMMIT = "commit"
    ABORT = "abort"


class TransactionMove(NamedTuple):
    """Legal move: ``event`` moves a transaction from one of ``leaves`` to ``enters``."""

    event: TransactionEvent
    leaves: frozenset[TransactionPhase]
    enters: TransactionPhase
    when: str = ""  # condition in words, if the event is ambiguous


_REST: Final = frozenset({TransactionPhase.IDLE, TransactionPhase.COMMITTED})
_OPEN: Final = frozenset(
    {TransactionPhase.PREPARED, TransactionPhase.TRANSFERRING, TransactionPhase.VERIFYING}
)
_VERIFIED: Final = frozenset({TransactionPhase.VERIFYING})
_NEW: Final = "it never had weights of this run"
_KEPT: Final = "it serves a version"

MOVES: Final = (
    TransactionMove(TransactionEvent.BEGIN, _REST, TransactionPhase.PREPARED),
    TransactionMove(TransactionEvent.CHUNK, _OPEN - _VERIFIED, TransactionPhase.TRANSFERRING),
    TransactionMove(TransactionEvent.VERIFY, _OPEN, TransactionPhase.VERIFYING),
    TransactionMove(TransactionEvent.COMMIT, _VERIFIED, TransactionPhase.COMMITTED),
    TransactionMove(TransactionEvent.ABORT, _OPEN, TransactionPhase.IDLE, _NEW),
    TransactionMove(TransactionEvent.ABORT, _OPEN, TransactionPhase.COMMITTED, _KEPT),
)

LEAVES: Final[Mapping[TransactionEvent, frozenset[TransactionPhase]]] = MappingProxyType({
    move.event: move.leaves for move in MOVES
})  # fmt: skip
"""Phases in which an event is legal."""

PROBLEMS: Final[Mapping[TransactionEvent, str]] = MappingProxyType({
    TransactionEvent.BEGIN: "one is open",
    TransactionEvent.VERIFY: "no transfer is open",
    TransactionEvent.COMMIT: "nothing is verified",
})  # fmt: skip
"""Why an event is illegal in all other phases. An event that is not listed has no effect there."""


def table() -> str:
    """Return the moves as the rows of the table in docs/weight-sync.md."""
    return "".join(
        f"| {', '.join(sorted(move.leaves))} | {move.event} | {move.enters} | {move.when} |\n"
        for move in MOVES
    )


TensorSpecs = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor of a replica, by name."""


class Transaction:
    """Transfers of one replica, one after the other. Every call is one move. Illegal moves raise.

    A refused move leaves the transaction unchanged. The caller must then abort.
    """

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.phase = TransactionPhase.IDLE
        self.epoch = -1  # epoch of the newest transfer begun
        self.version: int | None = None  # served version; None: no weights may be served
        self.digest = ""  # digest of the served release
        self._manifest: Manifest | None = None
        # Matching pair, cached to skip further comparisons
        self._fitting: tuple[Manifest, TensorSpecs] | None = None
        self._got: list[str] = []  # digests of the chunks received
        self._release = ""  # digest of the verified release

    @property
    def open(self) -> bool:
        """Return whether a transfer is in progress."""
        return self._allows(TransactionEvent.ABORT)

    @property
    def expects(self) -> int:
        """Return the index of the next chunk."""
        return len(self._got)

    def begin(
        self,
        epoch: int,
        manifest: Manifest,
        specs: TensorSpecs,
        needed: Mapping[str, Sequence[Region]] | None = None,
    ) -> None:
        """Open a transfer. It must contain exactly the replica's tensors.

        Args:
            epoch: Epoch of the transfer.
            manifest: Layout of the transfer.
            specs: Tensors of the replica.
            needed: The disjoint regions that the replica holds of each tensor. A tensor that is not
                listed is held as a whole.

        Raises:
            TransferRefused: The epoch is not newer than all before, a shape or type differs, or the
                regions of a tensor are not exactly the needed ones, each once.
            CoverageRefused: Tensors are missing or unknown.
            IllegalTransactionMove: Another transfer is open. The caller must abort it before.
        """
        if epoch <= self.epoch:
            raise TransferRefused(epoch, "epoch", str(epoch), f"more than {self.epoch}")
        self._check(TransactionEvent.BEGIN)
        self.epoch = epoch
        known = self._fitting
        if known is None or known[1] is not specs or not known[0].describes_as(manifest):
            _check_coverage(epoch, manifest, specs)
            _check_regions(epoch, manifest, needed or {})
            self._fitting = manifest, specs
        self._manifest, self._got, self._release = manifest, [], ""
        self.phase = TransactionPhase.PREPARED

    def arrived(self, epoch: int, index: int, nbytes: int, digest: str) -> bool:
        """Record the arrival of a chunk. Return False if it is late or a duplicate, else True.

        Raises:
            TransferRefused: The chunk is out of order or surplus, or contradicts the manifest.
        """
        manifest = self._manifest
        if epoch != self.epoch or not self.open or manifest is None or index < self.expects:
            return False
        if index >= len(manifest.chunk_nbytes):
            raise TransferRefused(epoch, "chunk index", str(index), "no further chunk")
        if index > self.expects:
            raise TransferRefused(epoch, "chunk index", str(index), str(self.expects))
        if nbytes != manifest.chunk_nbytes[index]:
            want = str(manifest.chunk_nbytes[index])
            raise TransferRefused(epoch, f"size of chunk {index}", str(nbytes), want)
        if manifest.chunk_digests and digest != manifest.chunk_digests[index]:
            names = _names_in(manifest, index)
            want = manifest.chunk_digests[index]
            raise TransferRefused(epoch, f"digest of chunk {index} ({names})", digest, want)
        self._got.append(digest)
        self.phase = TransactionPhase.TRANSFERRING
        return True

    def verify(self, digest: str) -> None:
        """Check that all chunks arrived and form the release.

        Raises:
            TransferRefused: Chunks are missing, or the digest differs.
        """
        self._check(TransactionEvent.VERIFY)
        manifest = self._manifest
        assert manifest is not None  # noqa: S101 -- for the type checker; open transfers have one
        if self.expects != len(manifest.chunk_nbytes):
            want = str(len(manifest.chunk_nbytes))
            raise TransferRefused(self.epoch, "chunks received", str(self.expects), want)
        got = release_digest(manifest, self._got)
        if got != digest:
            raise TransferRefused(self.epoch, "digest", got, digest)
        self._release, self.phase = digest, TransactionPhase.VERIFYING

    def may_commit(self, version: int) -> bool:
        """Return True if the target may switch, or False if this commit is a repetition.

        Raises:
            IllegalTransactionMove: No transfer is verified.
        """
        if self.phase is TransactionPhase.COMMITTED and self.version == version:
            return False
        self._check(TransactionEvent.COMMIT)
        return True

    def commit(self, version: int) -> None:
        """Record that the verified weights are served."""
        self._check(TransactionEvent.COMMIT)
        self.version, self.digest, self.phase = version, self._release, TransactionPhase.COMMITTED
        self._close()

    def abort(self) -> None:
        """Record that the open transfer was aborted and its staged weights dropped. Idempotent."""
        if self.open:
            self._close()
            served = self.version is not None
            self.phase = TransactionPhase.COMMITTED if served else TransactionPhase.IDLE

    def _close(self) -> None:
        self._manifest, self._got, self._release = None, [], ""

    def _allows(self, event: TransactionEvent) -> bool:
        return self.phase in LEAVES[event]

    def _check(self, event: TransactionEvent) -> None:
        if not self._allows(event):
            raise IllegalTransactionMove(self.replica, event, self.phase, PROBLEMS[event])


def _check_coverage(epoch: int, manifest: Manifest, specs: TensorSpecs) -> None:
    names = {spec.name for spec in manifest.tensors}
    if len(names) != len(manifest.tensors):
        raise TransferRefused(epoch, "tensors", str(len(manifest.tensors)), f"{len(names)} names")
    missing, unknown = specs.keys() - names, names - specs.keys()
    if missing or unknown:
        raise CoverageRefused(epoch, tuple(sorted(missing)), tuple(sorted(unknown)))
    for spec in manifest.tensors:
        got, want = (spec.shape, spec.dtype), specs[spec.name]
        if got != want:
            raise TransferRefused(epoch, f"tensor {spec.name!r}", str(got), str(want))


def _check_regions(epoch: int, manifest: Manifest, needed: Mapping[str, Sequence[Region]]) -> None:
    """Check that the pieces of every tensor cover its needed regions, each element once."""
    if not manifest.pieces:
        return
    by_tensor = dict[int, list[Region]]()
    for piece in manifest.pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece.region)
    # Tensors with equal cuts are compared once
    checked = set[tuple[tuple[Region, ...], tuple[Region, ...]]]()
    for index, spec in enumerate(manifest.tensors):
        want = tuple(needed.get(spec.name, (Region.whole(spec.shape),)))
        regions = tuple(by_tensor.get(index, ()))
        if (want, regions) in checked:
            continue
        got, total = union_elements(regions), sum(each.elements for each in regions)
        wanted = union_elements(want)
        if not got == total == wanted == union_elements((*regions, *want)):
            parts = f"{got} elements, {total - got} of them twice, in {len(regions)} regions"
            where = " and ".join(map(str, want)) or "none"
            what = f"tensor {spec.name!r}"
            raise TransferRefused(epoch, what, parts, f"{wanted} elements of {where} once")
        checked.add((want, regions))


def _names_in(manifest: Manifest, index: int) -> str:
    names = [spec.name for spec in manifest.tensors if spec.chunk == index]
    if manifest.pieces:
        pieces = (piece for piece in manifest.pieces if piece.chunk == index)
        names = [f"{manifest.tensors[each.tensor].name}{each.region}" for each in pieces]
    if not names:
        return "changes of weights"
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
