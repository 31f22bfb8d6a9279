"""Sender and receiver over one manifest, in process."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.manifest import ALIGNMENT, plan, release_digest
from offbeat.weight_sync.receiver import ModuleReceiver, TransferRefused
from offbeat.weight_sync.source import ModuleSource, named_weights


class Model(nn.Module):
    """Mixed types, a tied weight, a buffer, odd sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5).double()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.half = nn.Linear(5, 3).bfloat16()
        self.register_buffer("bias", torch.rand(3))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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


def _transfer(source: ModuleSource, receiver: ModuleReceiver, lost: str) -> None:
    """A whole transfer but for what is ``lost``."""
    chunks = [chunk for chunk, _ in source.chunks()]
    digests = [digest for _, digest in source.chunks()]
    receiver.begin(3, source.manifest)
    if lost == "order":
        receiver.apply(3, 1, chunks[1])
    for index, chunk in enumerate(chunks[:-1] if lost == "chunk" else chunks):
        sent = chunk ^ np.uint8(index == 2) if lost == "byte" else chunk
        receiver.apply(2 if lost == "epoch" else 3, index, sent)
    receiver.verify(release_digest(source.manifest, digests))


@pytest.mark.parametrize("lost", ["chunk", "byte", "order", "tensor", "dtype", "epoch", "unknown"])
def test_a_transfer_that_is_not_whole_changes_nothing_and_says_why(lost: str) -> None:
    sent, served = Model(1), Model(2)
    before = weights(served)
    if lost == "dtype":
        sent.norm.float()
    if lost == "tensor":
        del sent.half
    if lost == "unknown":
        sent.extra = nn.Linear(1, 1)
    source, receiver = ModuleSource(sent, 64), ModuleReceiver(served)
    with pytest.raises(TransferRefused) as refused:
        _transfer(source, receiver, lost)
    words = {
        "chunk": "chunks received",
        "byte": "digest",
        "order": "chunk index is 1, expected 0",
        "tensor": "coverage is without",
        "dtype": "tensor 'norm.weight'",
        "epoch": "chunks received is 0",
        "unknown": "coverage is with unknown",
    }
    assert words[lost] in str(refused.value)
    assert equal(before, weights(served))


def test_an_epoch_is_never_opened_twice_and_a_newer_one_drops_the_older() -> None:
    source, receiver = ModuleSource(Model(1), 64), ModuleReceiver(Model(2))
    receiver.begin(1, source.manifest)
    receiver.apply(1, 0, next(iter(source.chunks()))[0])
    receiver.begin(2, source.manifest)
    with pytest.raises(TransferRefused, match="epoch is 2"):
        receiver.begin(2, source.manifest)
    receiver.apply(2, 0, next(iter(source.chunks()))[0])


def test_a_snapshot_does_not_change_when_the_weights_do() -> None:
    model = Model(1)
    source = ModuleSource(model, 10**6)
    (chunk, _), *_ = source.chunks()
    before = chunk.copy()
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert np.array_equal(before, chunk)


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
