"""How many ranks are one: what is dealt to them, and which failure stands for those of all."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offbeat.actors.ray_ports import PayloadHandle
from offbeat.actors.ray_trainer import RayTrainer, combine_results, pick_failure, select_groups
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.failures import (
    ActorLost,
    ArgumentLost,
    PayloadLost,
    SchemaError,
    StartFailed,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
    UnfitGroup,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Chunk, ChunkResult
from offbeat.plugins.encoder_ranks.plugin import EncoderConfig
from offbeat.trainers.errors import ColumnsMissing, UnfitColumns
from offbeat.trainers.ranks.dispatch import Replicas, shares
from offbeat.trainers.ranks.peers import PeerFailed, WorldBroken

OWN = TrainStepFailed(1, 3, TrainerCall.MICROBATCH, "out of memory")
PEER = PeerFailed(0, 1, "microbatch")
BROKEN = WorldBroken(0, "microbatch", "Connection reset by peer")
GONE = ActorLost("trainer rank 1", "microbatch", "killed")


def test_a_failure_that_all_ranks_know_of_is_the_one_that_had_it() -> None:
    assert pick_failure({0: PEER, 1: OWN}, [], "microbatch") is OWN


def test_a_rank_that_is_gone_stands_before_those_that_miss_it() -> None:
    assert pick_failure({0: BROKEN, 1: GONE}, [], "microbatch") is GONE
    start = StartFailed("trainer rank 1", "no such model")
    assert pick_failure({0: GONE, 1: start}, [], "start") is start


def test_ranks_that_have_lost_each_other_are_a_lost_trainer() -> None:
    lost = pick_failure({0: BROKEN, 1: OWN}, [], "microbatch")
    assert isinstance(lost, ActorLost)
    assert "Connection reset by peer" in str(lost)


def test_a_rank_that_stays_silent_after_another_failed_is_a_lost_one() -> None:
    lost = pick_failure({0: OWN}, [1], "microbatch")
    assert isinstance(lost, ActorLost)
    assert lost.actor == "trainer rank 1"
    assert "out of memory" in str(lost)


def test_what_all_ranks_refuse_alike_is_refused() -> None:
    refused = StepOutOfOrder("finish", "begin")
    assert pick_failure({0: refused, 1: StepOutOfOrder("finish", "begin")}, [], "finish") is refused
    missing = SchemaError("response_ids", "missing", "written before")
    assert pick_failure({0: missing, 1: PEER}, [], "microbatch") is missing


def test_a_part_of_a_chunk_has_its_groups_in_order() -> None:
    chunk = Chunk((7, 3, 9), (("a",), ("b",), ("c",)), ((1.0,), (2.0,), (3.0,)), 60, (10, 20, 30))
    part = select_groups(chunk, (0, 2))
    assert (part.prompt_indices, part.payloads) == ((7, 9), (("a",), ("c",)))
    assert part.advantages == ((1.0,), (3.0,))
    assert select_groups(chunk, ()).payloads == ()
    assert select_groups(Chunk((7, 3), (("a",), ("b",))), (1,)).advantages == ()


def test_replies_are_added_up_and_the_slowest_counts() -> None:
    whole = combine_results([ChunkResult(10, 2, 1, 0.5), ChunkResult(0, 0, 0, 0.75)])
    assert (whole.tokens, whole.sequences, whole.microbatches) == (10, 2, 1)
    assert whole.compute_s == pytest.approx(0.75)


class Rank:
    """A handle whose ``train_microbatch`` answers this, or raises it."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    @property
    def train_microbatch(self) -> "Rank":
        return self

    def remote(self, *_: object) -> "asyncio.Future[object]":
        future = asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        else:
            future.set_result(self.answer)
        return future


class StartingRank:
    """A handle of a rank whose first call waits until it is up, and each ``state`` a second more."""

    def __init__(self, up: asyncio.Event) -> None:
        self._up, self._world, self.calls = up, "", list[str]()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._called, method))

    def _called(self, method: str, *_: object) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._answer(method))

    async def _answer(self, method: str) -> object:
        await self._up.wait()
        self.calls.append(method)
        answers = {"identity": ("process", self._world), "about": ("process", 1, 1)}
        if method == "join":
            await asyncio.sleep(0)
            self._world = "world"
        return answers.get(method, method)


def test_ranks_whose_state_is_asked_for_twice_while_they_start_form_one_group() -> None:
    async def start() -> list[list[str]]:
        up = asyncio.Event()
        ranks = [StartingRank(up), StartingRank(up)]
        trainer = RayTrainer(cast("list[Any]", ranks), TorchTrainerConfig(data_parallel=2))
        asked = [asyncio.ensure_future(trainer.state(Fence("run", 1))) for _ in range(2)]
        await asyncio.sleep(0)
        up.set()
        assert await asyncio.gather(*asked) == ["state", "state"]
        return [rank.calls for rank in ranks]

    first, second = asyncio.run(start())
    assert (first.count("listen"), first.count("join"), second.count("join")) == (1, 1, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_a_rank_cannot_train_is_named_by_its_prompt_index(rank: int) -> None:
    chunk = Chunk((7, 3, 9, 4), ((),) * 4, ((1.0,),) * 4, 60, (10, 30, 20, 40))
    share = shares({7: 10, 3: 30, 9: 20, 4: 40}, 2)[rank]
    unfit = UnfitColumns(1, "loss_mask", "3 values", "4").on(rank)
    answers: list[object] = [PeerFailed(each, rank, "microbatch") for each in range(2)]
    answers[rank] = unfit
    ranks: list[Any] = [Rank(each) for each in answers]

    async def train() -> None:
        trainer = RayTrainer(ranks, TorchTrainerConfig(data_parallel=2))
        await trainer.train_microbatch(Fence("run", 1), StepKey(1, 1, 1), chunk)

    with pytest.raises(UnfitGroup, match="'loss_mask' is 3 values") as refused:
        asyncio.run(train())
    assert (refused.value.rank, refused.value.prompt_index) == (rank, share[1])


def with_encoders(lanes: int, encoders: int, tensor: int = 1) -> TorchTrainerConfig:
    encoder = EncoderConfig(data_parallel=encoders, tensor_parallel=tensor)
    return TorchTrainerConfig(data_parallel=lanes, **dict[str, Any](encoder=encoder))


@pytest.mark.parametrize(
    ("config", "rank", "lanes"),
    [
        (with_encoders(2, 1), 2, (0, 1)),
        (with_encoders(2, 2), 2, (0,)),
        (with_encoders(2, 2), 3, (1,)),
        (with_encoders(2, 2, tensor=2), 5, (1,)),
    ],
    ids=["2 + 1", "2 + 2, first", "2 + 2, second", "2 + 2 x 2, the last"],
)
def test_a_group_that_an_encoder_rank_cannot_encode_is_one_of_its_lanes(
    config: TorchTrainerConfig, rank: int, lanes: tuple[int, ...]
) -> None:
    """It gets the groups of its lanes one lane after another, not in the order of the chunk."""
    chunk = Chunk((7, 3, 9, 4), ((),) * 4, ((1.0,),) * 4, 60, (10, 30, 20, 40))
    by_lane = shares({7: 10, 3: 30, 9: 20, 4: 40}, 2)
    groups = [group for lane in lanes for group in by_lane[lane]]
    answers: list[object] = [
        PeerFailed(each, rank, "microbatch") for each in range(Replicas.of(config).ranks)
    ]

    async def train(place: int) -> None:
        answers[rank] = UnfitColumns(place, "media_values", "2 pictures", "1").on(rank)
        ranks: list[Any] = [Rank(each) for each in answers]
        trainer = RayTrainer(ranks, config)
        await trainer.train_microbatch(Fence("run", 1), StepKey(1, 1, 1), chunk)

    for place, group in enumerate(groups):
        with pytest.raises(UnfitGroup, match="'media_values' is 2 pictures") as refused:
            asyncio.run(train(place))
        assert (refused.value.rank, refused.value.prompt_index) == (rank, group)


class Sent:
    """A rank that is sent columns ahead of its calls, and is told that they are lost."""

    def __init__(self, lost: str, answer: object) -> None:
        self.hold: Any = Rank(ArgumentLost("trainer rank", "hold", "died", lost) if lost else None)
        self.train_microbatch: Any = Rank(answer)


class Ref:
    """An object reference by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hex(self) -> str:
        return self.name


def test_columns_lost_by_any_rank_are_named_by_all_groups_that_are_in_them() -> None:
    """The first object holds groups 7 and 3, and is lost to both ranks; group 4 is well."""
    first, second, third = (cast("Any", Ref(name)) for name in ("first", "second", "third"))
    payloads = (
        (PayloadHandle(first, 0),),
        (PayloadHandle(first, 1),),
        (PayloadHandle(second, 0),),
        (PayloadHandle(third, 0),),
    )
    chunk = Chunk((7, 3, 9, 4), payloads, ((1.0,),) * 4, 60, (10, 30, 20, 40))
    ranks: list[Any] = [
        Sent("second", ColumnsMissing(0, "train_microbatch")),
        Sent("first", ColumnsMissing(1, "train_microbatch")),
    ]

    async def train() -> None:
        trainer = RayTrainer(ranks, TorchTrainerConfig(data_parallel=2))
        await trainer.train_microbatch(Fence("run", 1), StepKey(1, 1, 1), chunk)

    with pytest.raises(PayloadLost) as lost:
        asyncio.run(train())
    assert lost.value.prompt_indices == (7, 3, 9)


def test_columns_that_an_encoder_rank_alone_lost_are_named_by_their_groups() -> None:
    """Rank 2 encodes for both lanes; one of two objects is lost to it, and it is of lane 0 or 1."""
    first, second = (cast("Any", Ref(name)) for name in ("first", "second"))
    payloads = (
        (PayloadHandle(first, 0),),
        (PayloadHandle(second, 0),),
        (PayloadHandle(first, 1),),
        (PayloadHandle(second, 1),),
    )
    chunk = Chunk((7, 3, 9, 4), payloads, ((1.0,),) * 4, 60, (10, 30, 20, 40))

    async def train(lost: str) -> None:
        waiting = [PeerFailed(each, 2, "microbatch") for each in range(2)]
        encoder = Sent(lost, ColumnsMissing(2, "train_microbatch"))
        ranks: list[Any] = [*(Sent("", each) for each in waiting), encoder]
        trainer = RayTrainer(ranks, with_encoders(2, 1))
        await trainer.train_microbatch(Fence("run", 1), StepKey(1, 1, 1), chunk)

    for name, prompt_indices in (("first", (7, 9)), ("second", (3, 4))):
        with pytest.raises(PayloadLost) as lost:
            asyncio.run(train(name))
        assert lost.value.prompt_indices == prompt_indices


def test_an_encoder_rank_that_dies_or_hangs_is_a_lost_trainer_whose_reason_names_it() -> None:
    died = ActorLost("trainer rank 2", "microbatch", "killed")
    assert pick_failure({0: PeerFailed(0, 2, "microbatch"), 2: died}, [1], "microbatch") is died
    lost = pick_failure({0: PeerFailed(0, 2, "microbatch"), 1: OWN}, [2], "microbatch")
    assert isinstance(lost, ActorLost)
    assert lost.actor == "trainer rank 2"
