"""A replica's transaction by itself: no tensors, no bytes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.weight_sync.errors import (
    CoverageRefused,
    IllegalTransactionMove,
    TransferRefused,
)
from offbeat.weight_sync.manifest import Manifest, plan, release_digest
from offbeat.weight_sync.transaction import (
    LEAVES,
    MOVES,
    PROBLEMS,
    TensorSpecs,
    Transaction,
    TransactionEvent,
    TransactionPhase,
    table,
)

PAGE = Path(__file__).parents[3] / "docs" / "weight-sync.md"
SPECS: TensorSpecs = {"a": ((4,), "float32"), "b": ((2,), "bfloat16"), "c": ((16,), "float32")}
DIGESTS = ["d0", "d1", "d2"]


def manifest(specs: TensorSpecs = SPECS) -> Manifest:
    laid = plan([(name, shape, dtype) for name, (shape, dtype) in specs.items()], chunk_bytes=1)
    return laid.seal(DIGESTS[: len(specs)])


def release(of: Manifest) -> str:
    return release_digest(of, of.chunk_digests)


def taken(transaction: Transaction, epoch: int, chunks: int = 3) -> Transaction:
    transaction.begin(epoch, manifest(), SPECS)
    for index in range(chunks):
        nbytes = manifest().chunk_nbytes[index]
        assert transaction.arrived(epoch, index, nbytes, DIGESTS[index])
    return transaction


def committed(transaction: Transaction, epoch: int, version: int) -> Transaction:
    taken(transaction, epoch).verify(release(manifest()))
    transaction.commit(version)
    return transaction


def test_a_whole_transfer_is_served() -> None:
    replica = committed(Transaction("r"), 1, 5)
    assert (replica.phase, replica.version, replica.digest) == (
        *(TransactionPhase.COMMITTED, 5),
        release(manifest()),
    )


def test_missing_and_unknown_tensors_are_named_all_of_them() -> None:
    other = {"a": SPECS["a"], "x": ((1,), "float32"), "y": ((1,), "float32")}
    replica = Transaction("r")
    with pytest.raises(CoverageRefused) as refused:
        replica.begin(3, manifest(other), SPECS)
    assert (refused.value.missing, refused.value.unknown) == (("b", "c"), ("x", "y"))
    assert "without 2 tensors: b, c; with unknown 2 tensors: x, y" in str(refused.value)
    assert replica.phase is TransactionPhase.IDLE, "nothing was touched"


def test_a_tensor_named_twice_is_refused() -> None:
    twice = plan([("a", (4,), "float32"), ("a", (4,), "float32")], 1)
    with pytest.raises(TransferRefused, match="tensors is 2, expected 1 names"):
        Transaction("r").begin(1, twice, {"a": SPECS["a"]})


@pytest.mark.parametrize(
    ("index", "nbytes", "digest", "words"),
    [
        (2, 64, "d2", "chunk index is 2, expected 1"),
        (9, 64, "d2", "chunk index is 9, expected no further chunk"),
        (1, 5, "d1", "size of chunk 1 is 5, expected 4"),
        (1, 4, "d9", "digest of chunk 1 (b) is d9, expected d1"),
    ],
)
def test_what_is_not_the_next_chunk_as_sent_is_refused_when_it_comes(
    index: int, nbytes: int, digest: str, words: str
) -> None:
    replica = taken(Transaction("r"), 1, chunks=1)
    with pytest.raises(TransferRefused) as refused:
        replica.arrived(1, index, nbytes, digest)
    assert words in str(refused.value)
    assert replica.expects == 1


def test_late_and_repeated_chunks_are_dropped() -> None:
    replica = taken(Transaction("r"), 4, chunks=2)
    for epoch in (3, 5, -1):
        assert not replica.arrived(epoch, 0, 16, "d0")
    for index in (0, 1):
        assert not replica.arrived(4, index, 16, "whatever")
    assert replica.expects == 2
    replica.abort()
    assert not replica.arrived(4, 2, 64, "d2")


def test_a_commit_that_comes_twice_is_one() -> None:
    replica = committed(Transaction("r"), 1, 5)
    assert not replica.may_commit(5)
    with pytest.raises(IllegalTransactionMove, match="nothing is verified"):
        replica.may_commit(6)


def test_an_abort_keeps_the_served_version_and_its_epoch_is_not_used_again() -> None:
    replica = committed(Transaction("r"), 1, 5)
    taken(replica, 2, chunks=1)
    replica.abort()
    assert (replica.phase, replica.version) == (TransactionPhase.COMMITTED, 5)
    assert replica.digest == release(manifest())
    with pytest.raises(TransferRefused):
        replica.begin(2, manifest(), SPECS)
    assert committed(replica, 3, 6).version == 6


class Machine(RuleBasedStateMachine):
    """Anything in any order: what is served was verified, and an abort changes none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.replica = Transaction("r")
        self.served: int | None = None  # the model: version of the last commit
        self.epoch = 0

    @rule()
    def begin(self) -> None:
        self.replica.abort()
        self.epoch += 1
        self.replica.begin(self.epoch, manifest(), SPECS)

    @rule(epochs_ago=st.integers(0, 1), index=st.integers(0, 3), digest=st.sampled_from(DIGESTS))
    def chunk(self, epochs_ago: int, index: int, digest: str) -> None:
        nbytes = manifest().chunk_nbytes[min(index, 2)]
        try:
            self.replica.arrived(self.epoch - epochs_ago, index, nbytes, digest)
        except TransferRefused:
            assert index != self.replica.expects or digest != f"d{index}"

    @precondition(lambda self: self.replica.open)
    @rule()
    def next_chunk(self) -> None:
        if (index := self.replica.expects) < 3:
            nbytes = manifest().chunk_nbytes[index]
            assert self.replica.arrived(self.epoch, index, nbytes, DIGESTS[index])

    @rule()
    def commit(self) -> None:
        try:
            self.replica.verify(release(manifest()))
            self.replica.commit(self.epoch)
            self.served = self.epoch
        except (TransferRefused, IllegalTransactionMove):
            assert self.replica.expects < 3 or not self.replica.open

    @rule()
    def abort(self) -> None:
        self.replica.abort()

    @invariant()
    def only_a_verified_release_is_served(self) -> None:
        assert self.replica.version == self.served
        assert self.replica.digest == ("" if self.served is None else release(manifest()))
        if not self.replica.open:
            resting = TransactionPhase.IDLE if self.served is None else TransactionPhase.COMMITTED
            assert self.replica.phase is resting


TestMachine = Machine.TestCase


@given(st.permutations(range(3)))
def test_only_one_order_goes_through(order: list[int]) -> None:
    replica = Transaction("r")
    replica.begin(1, manifest(), SPECS)
    try:
        for index in order:
            replica.arrived(1, index, manifest().chunk_nbytes[index], DIGESTS[index])
        replica.verify(release(manifest()))
    except TransferRefused:
        assert list(order) != [0, 1, 2]
    else:
        assert list(order) == [0, 1, 2]


def next_chunk(replica: Transaction) -> None:
    index = min(replica.expects, 2)
    replica.arrived(replica.epoch, replica.expects, manifest().chunk_nbytes[index], DIGESTS[index])


CALLS: dict[TransactionEvent, Callable[[Transaction], object]] = {
    TransactionEvent.BEGIN: lambda replica: replica.begin(9, manifest(), SPECS),
    TransactionEvent.CHUNK: next_chunk,
    TransactionEvent.VERIFY: lambda replica: replica.verify(
        release(manifest(SPECS if replica.expects else {}))
    ),
    TransactionEvent.COMMIT: lambda replica: replica.commit(6),
    TransactionEvent.ABORT: lambda replica: replica.abort(),
}


def at(phase: TransactionPhase) -> list[Transaction]:
    """Replicas that are in a phase, in each way that an event tells apart."""
    replica, served = Transaction("r"), committed(Transaction("r"), 1, 5)
    match phase:
        case TransactionPhase.IDLE:
            found = [replica]
        case TransactionPhase.PREPARED:
            replica.begin(1, manifest({}), {})
            found = [replica, taken(Transaction("r"), 1, chunks=0), taken(served, 2, chunks=0)]
        case TransactionPhase.TRANSFERRING:
            found = [taken(replica, 1), taken(Transaction("r"), 1, chunks=1), taken(served, 2)]
        case TransactionPhase.VERIFYING:
            found = [taken(replica, 1), taken(served, 2)]
            for each in found:
                each.verify(release(manifest()))
        case TransactionPhase.COMMITTED:
            found = [served]
    return found


@pytest.mark.parametrize("phase", TransactionPhase)
@pytest.mark.parametrize("event", TransactionEvent)
def test_a_transaction_makes_the_moves_of_the_table_and_no_others(
    event: TransactionEvent, phase: TransactionPhase
) -> None:
    replicas, entered = at(phase), set[TransactionPhase]()
    for replica in replicas:
        assert replica.phase is phase
        if phase not in LEAVES[event] and event in PROBLEMS:
            with pytest.raises(IllegalTransactionMove, match=PROBLEMS[event]):
                CALLS[event](replica)
        else:
            with suppress(TransferRefused):  # too few chunks, or one too many
                CALLS[event](replica)
        entered.add(replica.phase)
    enters = {move.enters for move in MOVES if move.event is event and phase in move.leaves}
    assert entered - {phase} == enters - {phase}


def test_the_page_shows_the_table_of_moves() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), f"put these rows there:\n{table()}"
