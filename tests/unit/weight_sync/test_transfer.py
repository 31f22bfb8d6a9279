"""Sender and receiver over one manifest, in process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_models import Model, equal, weights

from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import ALIGNMENT, plan, release_digest
from offbeat.weight_sync.receiver import ModuleReceiver
from offbeat.weight_sync.source import ModuleSource


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


def test_an_epoch_is_never_opened_twice_and_a_newer_one_drops_the_older() -> None:
    source, receiver = ModuleSource(Model(1), 64), ModuleReceiver(Model(2))
    receiver.begin(1, source.manifest)
    receiver.apply(1, 0, next(iter(source.chunks()))[0])
    receiver.begin(2, source.manifest)
    with pytest.raises(TransferRefused, match="epoch is 2"):
        receiver.begin(2, source.manifest)
    receiver.apply(2, 0, next(iter(source.chunks()))[0])


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
