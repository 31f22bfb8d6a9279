"""Every row of the failure table in docs/weight-sync.md, on plain modules.

After each of them the old weights are served, and a whole transfer is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from offbeat.weight_sync.chunks import Bytes
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.errors import CoverageRefused, TransferRefused
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.receiver import ModuleTarget, Named, Receiver
from offbeat.weight_sync.transaction import TransactionPhase
from offbeat.weight_sync.transport import PublishedRelease
from tests.support.plain_modules import ModuleReceiver, ModuleSource
from tests.support.weight_models import Model, equal, weights

SENT = Model(1)
CHUNK_BYTES = 200
CHUNK_SIZES = ModuleSource(SENT, CHUNK_BYTES).manifest.chunk_nbytes
CHUNKS = len(CHUNK_SIZES)
CHUNKS_WITH_BYTES = [at for at, nbytes in enumerate(CHUNK_SIZES) if nbytes]


class Died(Exception):
    """Stands for whatever a process dies of."""


@dataclass
class Replica:
    """A receiver that serves version 0."""

    model: Model
    receiver: Receiver

    def take(
        self,
        epoch: int,
        published: PublishedRelease,
        changed: Callable[[int, Bytes], Bytes] = lambda _, data: data,
    ) -> None:
        """As an engine does it: whatever raises ends in an abort, and is raised."""
        receiver, (manifest, digest, chunks, *_) = self.receiver, published
        try:
            receiver.begin(epoch, manifest)
            for index, data in enumerate(chunks):
                receiver.apply(epoch, index, changed(index, data))
            receiver.verify(digest)
            receiver.commit(epoch)
        except BaseException:
            receiver.abort()
            raise

    def heals(self, epoch: int) -> None:
        """A full sync of a new epoch is exact, whatever happened before."""
        self.take(epoch, release())
        assert equal(weights(self.model), weights(SENT))
        assert self.receiver.transaction.version == epoch

    def serves_as_before(self, before: dict[str, torch.Tensor]) -> None:
        transaction = self.receiver.transaction
        assert (transaction.phase, transaction.version) == (TransactionPhase.COMMITTED, 0)
        assert equal(weights(self.model), before)


def release(model: nn.Module = SENT, policy: WirePolicy | None = None) -> PublishedRelease:
    return ObjectStoreSender(ModuleSource(model, CHUNK_BYTES, policy)).publish(1)


@pytest.fixture
def on() -> Replica:
    model = Model(2)
    first = Replica(model, ModuleReceiver(model))
    first.take(0, release(Model(3)))
    return first


@pytest.mark.parametrize("at", range(CHUNKS))
def test_a_transfer_that_stops_before_a_chunk(on: Replica, at: int) -> None:
    """The sender raises or dies, or the receiver does: the chunk does not come."""
    before = weights(on.model)

    def stops(index: int, data: Bytes) -> Bytes:
        if index == at:
            raise Died
        return data

    with pytest.raises(Died):
        on.take(1, release(), stops)
    on.serves_as_before(before)
    on.heals(2)


@pytest.mark.parametrize("at", range(CHUNKS))
def test_a_target_that_raises_in_the_middle_of_a_chunk(at: int) -> None:
    class Raises(ModuleTarget):
        calls, raises_at, rollbacks = 0, -1, 0

        def load(self, tensors: Named) -> None:
            self.calls += 1
            super().load(tensors[:1])
            if self.calls - 1 == self.raises_at:
                raise Died
            super().load(tensors[1:])

        def rollback(self) -> None:
            self.rollbacks += 1
            super().rollback()

    model = Model(2)
    target = Raises(model)
    on = Replica(model, Receiver(target, "g0"))
    on.take(0, release(Model(3)))
    before = weights(model)
    target.calls, target.raises_at = 0, at
    with pytest.raises(Died):
        on.take(1, release())
    on.serves_as_before(before)
    assert target.rollbacks == 1
    target.raises_at = -1
    on.heals(2)


def test_a_tensor_is_missing(on: Replica) -> None:
    lacking, before = Model(1), weights(on.model)
    del lacking.half
    with pytest.raises(CoverageRefused) as refused:
        on.take(1, release(lacking))
    assert refused.value.missing == ("half.bias", "half.weight")
    on.serves_as_before(before)
    on.heals(2)


def test_a_tensor_is_unknown(on: Replica) -> None:
    extended, before = Model(1), weights(on.model)
    extended.extra = nn.Linear(1, 1)
    with pytest.raises(CoverageRefused) as refused:
        on.take(1, release(extended))
    assert refused.value.unknown == ("extra.bias", "extra.weight")
    on.serves_as_before(before)
    on.heals(2)


def test_a_tensor_has_another_type(on: Replica) -> None:
    before = weights(on.model)
    with pytest.raises(TransferRefused, match=r"tensor 'empty' is .*'bfloat16'"):
        on.take(1, release(policy=WirePolicy("bfloat16")))
    on.serves_as_before(before)
    on.heals(2)


def test_a_tensor_has_another_shape(on: Replica) -> None:
    other, before = Model(1), weights(on.model)
    other.norm = nn.LayerNorm(6).double()
    with pytest.raises(TransferRefused, match=r"tensor 'norm.weight' is \(\(6,\)"):
        on.take(1, release(other))
    on.serves_as_before(before)
    on.heals(2)


@pytest.mark.parametrize("at", CHUNKS_WITH_BYTES)
def test_a_bit_is_flipped_on_the_way(on: Replica, at: int) -> None:
    before = weights(on.model)

    def flipped(index: int, data: Bytes) -> Bytes:
        data = data.copy()
        data[:1] ^= index == at
        return data

    with pytest.raises(TransferRefused, match=rf"digest of chunk {at} \("):
        on.take(1, release(), flipped)
    on.serves_as_before(before)
    on.heals(2)


def test_chunks_come_in_another_order(on: Replica) -> None:
    before, whole = weights(on.model), release()
    swapped = (whole.handles[1], whole.handles[0], *whole.handles[2:])
    with pytest.raises(TransferRefused, match="of chunk 0"):
        on.take(1, whole._replace(handles=swapped))
    on.serves_as_before(before)
    on.heals(2)


def test_a_chunk_is_missing_at_the_end(on: Replica) -> None:
    before, whole = weights(on.model), release()
    with pytest.raises(TransferRefused, match=f"chunks received is {CHUNKS - 1}"):
        on.take(1, whole._replace(handles=whole.handles[:-1]))
    on.serves_as_before(before)
    on.heals(2)


def test_a_release_that_is_not_the_one_announced(on: Replica) -> None:
    before = weights(on.model)
    with pytest.raises(TransferRefused, match="digest is"):
        on.take(1, release()._replace(digest="another"))
    on.serves_as_before(before)
    on.heals(2)


def test_late_and_repeated_chunks_do_nothing(on: Replica) -> None:
    receiver, (manifest, digest, chunks, *_) = on.receiver, release()
    stray = release(Model(9)).handles
    receiver.begin(5, manifest)
    for index, data in enumerate(chunks):
        assert not receiver.apply(4, index, stray[index]), "of an epoch before"
        assert not receiver.apply(6, index, stray[index]), "of an epoch nobody has begun"
        assert receiver.apply(5, index, data)
        assert not receiver.apply(5, index, stray[index]), "once more"
    receiver.verify(digest)
    receiver.commit(5)
    assert equal(weights(on.model), weights(SENT))
    on.heals(6)


def test_a_commit_is_issued_again(on: Replica) -> None:
    on.take(1, release())
    on.receiver.commit(1)
    assert on.receiver.transaction.version == 1
    assert equal(weights(on.model), weights(SENT))
    on.heals(2)


def test_an_engine_is_started_anew_in_the_middle(on: Replica) -> None:
    """Its next incarnation has begun no transfer, so it drops chunks that still travel."""
    manifest, _, chunks, *_ = release()
    on.receiver.begin(1, manifest)
    on.receiver.apply(1, 0, chunks[0])
    model = Model(2)
    new = Replica(model, ModuleReceiver(model))
    assert not new.receiver.apply(1, 1, chunks[1])
    assert (new.receiver.transaction.phase, new.receiver.transaction.version) == (
        *(TransactionPhase.IDLE, None),
    )
    new.heals(2)


def test_an_older_transfer_is_not_begun_after_a_newer_one(on: Replica) -> None:
    on.take(5, release())
    with pytest.raises(TransferRefused, match="epoch is 4, expected more than 5"):
        on.take(4, release(Model(9)))
    assert equal(weights(on.model), weights(SENT))
    on.heals(6)


def test_weights_that_change_while_they_are_sent_are_sent_as_they_were(on: Replica) -> None:
    model = Model(1)
    whole = release(model)
    with torch.no_grad():
        model.embed.weight.add_(1)
    on.take(1, whole)
    assert equal(weights(on.model), weights(SENT))
    on.heals(2)
