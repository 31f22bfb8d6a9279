"""How a step's groups are divided into minibatches, and what the controller sends of it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.train_step import MinibatchAssigner
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Chunk, ChunkResult
from tests.support.fakes import FakeTrainer
from tests.support.world import World


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(2, 9), st.integers(0, 99))
def test_minibatches_differ_by_one_group_at_most_whatever_the_chunks(
    chunks: list[int], minibatches: int, step: int
) -> None:
    assigner, sizes, drawn = MinibatchAssigner(minibatches, 7, step), Counter[int](), 0
    for size in chunks:
        sizes.update(assigner.of(range(drawn, drawn + size)))
        drawn += size
    assert sizes.total() == drawn
    assert set(sizes) <= set(range(minibatches))
    counts = [sizes[each] for each in range(minibatches)]
    assert max(counts) - min(counts) <= 1


def test_a_chunk_is_divided_by_its_groups_alone_not_by_the_order_of_their_arrival() -> None:
    came = (9, 4, 7, 1, 12, 3)
    one = dict(zip(came, MinibatchAssigner(3, 7, 2).of(came), strict=True))
    other = dict(zip(sorted(came), MinibatchAssigner(3, 7, 2).of(sorted(came)), strict=True))
    assert one == other


def test_another_step_is_divided_otherwise() -> None:
    divided = {MinibatchAssigner(4, 7, step).of(range(16)) for step in range(8)}
    assert len(divided) > 1


class Recorder(FakeTrainer):
    """Keeps the chunks it was sent."""

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        self.sent.append(chunk)
        return await super().train_microbatch(fence, key, chunk)

    def __init__(self) -> None:
        super().__init__()
        self.sent = list[Chunk]()


def test_with_minibatches_a_step_is_sent_whole_and_with_one_it_is_not_marked() -> None:
    several, one = Recorder(), Recorder()
    early = {"min_tokens_per_chunk": 1}
    world = World({"steps": 3, "trainer": early}, trainer=several, loss=LossSpec(minibatches=2))
    world.run()
    world.assert_ledger_agrees()
    World({"steps": 3, "trainer": early}, trainer=one).run()
    assert len(several.sent) == 3
    assert all(sorted(set(chunk.minibatches)) == [0, 1] for chunk in several.sent)
    assert all(chunk.minibatches == () for chunk in one.sent)
