"""Sender and receiver over one manifest, in process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import ALIGNMENT, Manifest, plan, release_digest
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.receiver import ModuleTarget, Receiver
from tests.support.plain_modules import ModuleReceiver, ModuleSource
from tests.support.release_parts import receive_release
from tests.support.weight_models import Model, equal, weights


@pytest.mark.parametrize("chunk_bytes", [1, 64, 200, 10**6])
def test_what_is_sent_is_what_is_served_whatever_the_chunks(chunk_bytes: int) -> None:
    sent, served = Model(1), Model(2)
    source, receiver = ModuleSource(sent, chunk_bytes), ModuleReceiver(served)
    chunks = list(source.chunks())
    receiver.begin(1, source.manifest)
    for index, (chunk, _) in enumerate(chunks):
        chunk.flags.writeable = False  # as out of shared memory
        receiver.apply(1, index, chunk)
    receiver.verify(release_digest(source.manifest, [digest for _, digest in chunks]))
    assert not equal(weights(sent), weights(served)), "nothing is written before commit"
    receiver.commit(1)
    assert equal(weights(sent), weights(served))
    assert served.head.weight is served.embed.weight


def test_a_release_that_is_cut_differently_is_received_as_it_is_cut() -> None:
    served = Model(9)
    receiver = ModuleReceiver(served)
    for epoch, chunk_bytes in enumerate((64, 64, 10**6, 200), start=1):
        sent = Model(epoch)
        manifest, digest, chunks, *_ = ObjectStoreSender(ModuleSource(sent, chunk_bytes)).publish(1)
        receive_release(receiver, epoch, manifest, chunks, digest)
        assert equal(weights(sent), weights(served))


def test_only_a_newer_epoch_makes_the_target_undo_an_open_transfer() -> None:
    class Counting(ModuleTarget):
        rollbacks = 0

        def rollback(self) -> None:
            self.rollbacks += 1
            super().rollback()

    target, source = Counting(Model(2)), ModuleSource(Model(1), 64)
    receiver = Receiver(target)
    receiver.begin(2, source.manifest)
    for epoch in (1, 2):
        with pytest.raises(TransferRefused, match=f"epoch is {epoch}"):
            receiver.begin(epoch, source.manifest)
        assert target.rollbacks == 0
    receiver.begin(3, source.manifest)
    assert target.rollbacks == 1


def test_a_target_prepares_for_nothing_that_was_refused() -> None:
    class Counting(ModuleTarget):
        prepared = 0

        def prepare(self, manifest: Manifest) -> None:
            super().prepare(manifest)
            self.prepared += 1

    target = Counting(Model(2))
    receiver, stranger = Receiver(target), nn.Linear(2, 3)
    with pytest.raises(TransferRefused):
        receiver.begin(1, ModuleSource(stranger, 64).manifest)
    assert target.prepared == 0
    receiver.begin(2, ModuleSource(Model(1), 64).manifest)
    assert target.prepared == 1


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["bfloat16", "float32"])
        ),
        max_size=12,
    ),
    st.integers(1, 500),
)
def test_a_plan_covers_every_tensor_once_aligned_and_within_its_chunk(
    shapes: list[tuple[list[int], str]], chunk_bytes: int
) -> None:
    manifest = plan(
        ((f"w{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)), chunk_bytes
    )
    walked = [spec for chunk in walk(manifest) for spec in chunk.specs]
    assert [spec.name for spec in walked] == [f"w{i}" for i in range(len(shapes))]
    for chunk in walk(manifest):
        nbytes, specs = chunk.nbytes, chunk.specs
        assert nbytes <= chunk_bytes or len([s for s in specs if s.nbytes]) <= 1
        for spec, after in zip(specs, [*specs[1:], None], strict=True):
            assert spec.offset % ALIGNMENT == 0
            assert spec.offset + spec.nbytes <= (nbytes if after is None else after.offset)
