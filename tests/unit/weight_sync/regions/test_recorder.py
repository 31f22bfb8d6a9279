"""What an engine's loader puts where, learned by running it over tensors without memory."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.weight_sync.errors import LayoutNotRecorded
from offbeat.weight_sync.recorder import EngineRecording, record
from offbeat.weight_sync.region import Region

HIDDEN, HEAD, HEADS, KV_HEADS, EXPERTS, INNER, VOCABULARY = 8, 2, 4, 2, 3, 12, 10
PADDED = 12
EXPERT = "experts.{}.{}_proj.weight"

CHECKPOINT = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "q_proj.weight": (HEADS * HEAD, HIDDEN),
    "k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "o_proj.weight": (HIDDEN, HEADS * HEAD),
    "norm.weight": (HIDDEN,),
    "router.bias": (EXPERTS,),
    **{
        EXPERT.format(at, kind): (INNER, HIDDEN) for at in range(EXPERTS) for kind in ("gate", "up")
    },
    **{EXPERT.format(at, "down"): (HIDDEN, INNER) for at in range(EXPERTS)},
}


class EngineRank(nn.Module):
    """One of several tensor-parallel ranks, stacked, fused and padded as vLLM does."""

    embed: nn.Parameter
    qkv: nn.Parameter
    o: nn.Parameter
    norm: nn.Parameter
    bias: nn.Parameter
    w13: nn.Parameter
    w2: nn.Parameter

    def __init__(self, ranks: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.ranks, self.rank = ranks, rank
        self.kv = max(1, KV_HEADS // ranks)
        rows, kv, inner = HEADS * HEAD // ranks, self.kv * HEAD, INNER // ranks
        shapes = {
            "embed": (PADDED // ranks, HIDDEN),
            "qkv": (rows + 2 * kv, HIDDEN),
            "o": (HIDDEN, rows),
            "norm": (HIDDEN,),
            "bias": (EXPERTS,),
            "w13": (EXPERTS, 2 * inner, HIDDEN),
            "w2": (EXPERTS, HIDDEN, inner),
        }
        for name, shape in shapes.items():
            dtype = torch.float32 if name == "bias" else torch.bfloat16
            self.register_parameter(name, nn.Parameter(torch.full(shape, -1.0, dtype=dtype)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self.load(name, weight)

    def load(self, name: str, weight: Tensor) -> None:
        rows, kv = HEADS * HEAD // self.ranks, self.kv * HEAD
        kind, _, rest = name.partition(".")
        if kind == "embed":
            size = PADDED // self.ranks
            own = weight[self.rank * size : (self.rank + 1) * size]
            self.embed.data[: len(own)].copy_(own)
            self.embed.data[len(own) :].fill_(0)
        elif kind in ("q_proj", "k_proj", "v_proj"):
            size = rows if kind == "q_proj" else kv
            at = {"q_proj": 0, "k_proj": rows, "v_proj": rows + kv}[kind]
            part = (
                self.rank if kind == "q_proj" else self.rank * KV_HEADS // max(self.ranks, KV_HEADS)
            )
            self.qkv.data.narrow(0, at, size).copy_(weight.narrow(0, part * size, size))
        elif kind == "o_proj":
            self.o.data.copy_(weight.narrow(1, self.rank * rows, rows))
        elif kind == "experts":
            expert, what, _ = rest.split(".")
            self.load_expert(int(expert), what.removesuffix("_proj"), weight)
        else:
            {"norm": self.norm, "router": self.bias}[kind].data.copy_(weight)

    def load_expert(self, expert: int, what: str, weight: Tensor) -> None:
        inner = INNER // self.ranks
        if what == "down":
            self.w2.data[expert].copy_(weight.narrow(1, self.rank * inner, inner))
        else:
            half = self.w13.data[expert].narrow(0, inner * (what == "up"), inner)
            half.copy_(weight.narrow(0, self.rank * inner, inner))


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape).bfloat16() for name, shape in CHECKPOINT.items()}


def recorded(rank: EngineRank, load: Callable[..., Any] | None = None) -> EngineRecording:
    specs = {name: (shape, torch.bfloat16) for name, shape in CHECKPOINT.items()}
    return record(load or rank.load_weights, dict(rank.named_parameters()), specs)


def values(rank: EngineRank) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in rank.named_parameters()}


def replay(recording: EngineRecording, given_: dict[str, Tensor], rank: EngineRank) -> None:
    """Write the recorded boxes, as a receiver would."""
    for name, region in recording.regions():
        box = given_[name][region.slices]
        recording.write(name, region, box, dict(rank.named_parameters()))


@given(ranks=st.sampled_from([1, 2, 4]), rank=st.integers(0, 3))
@settings(max_examples=12)
def test_writing_the_recorded_boxes_is_loading_the_checkpoint(ranks: int, rank: int) -> None:
    loaded, written = (EngineRank(ranks, rank % ranks) for _ in range(2))
    before = values(written)
    recording = recorded(written)
    assert all(torch.equal(each, before[name]) for name, each in values(written).items())
    assert recording.misc == {}
    weights = checkpoint()
    loaded.load_weights(weights.items())
    with torch.no_grad():
        written.embed.zero_()  # padding is filled once, when an engine starts
    replay(recording, weights, written)
    for name, each in values(written).items():
        assert torch.equal(each, values(loaded)[name]), name


def test_the_ranks_of_an_engine_together_need_every_element_of_the_checkpoint() -> None:
    needed = {name: torch.zeros(shape) for name, shape in CHECKPOINT.items()}
    for rank in range(2):
        for name, region in recorded(EngineRank(2, rank)).regions():
            needed[name][region.slices] += 1
    for name, count in needed.items():
        once = name not in ("norm.weight", "router.bias")
        assert torch.equal(count, torch.full_like(count, 1 if once else 2)), name


def test_a_fused_parameter_says_which_box_of_which_tensor_lands_where() -> None:
    (up,) = (e for e in recorded(EngineRank(2, 1)).copies if e.tensor == EXPERT.format(2, "up"))
    assert up.region == Region((6, 0), (12, 8))
    assert up.place == ("w13", (6, 8), (8, 1), 2 * 12 * 8 + 6 * 8)


def test_a_slice_of_a_fused_checkpoint_tensor_and_a_transposed_one_are_boxes() -> None:
    parameters = {"w": torch.empty(4, 5), "t": torch.empty(6, 3)}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        given_ = dict(weights)
        parameters["w"].copy_(given_["fused"][2])
        parameters["t"].copy_(given_["matrix"].t())

    specs = {"fused": ((3, 4, 5), torch.float32), "matrix": ((3, 6), torch.float32)}
    first, second = record(load, parameters, specs).copies
    assert (first.region, first.place.stride) == (Region((2, 0, 0), (3, 4, 5)), (0, 5, 1))
    assert (second.region, second.place.stride) == (Region((0, 0), (3, 6)), (1, 3))
    weight = torch.randn(3, 6)
    second.place.of(parameters).copy_(weight)
    assert torch.equal(parameters["t"], weight.t())


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * 2,
        lambda w: w.float(),
        lambda w: w.flip(0),
        lambda w: w.reshape(-1)[1:].clone(),
    ],
)
def test_a_tensor_that_the_loader_computes_with_goes_whole(
    change: Callable[[Tensor], Tensor],
) -> None:
    rank = EngineRank()

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "norm.weight":
                changed = change(weight)
                rank.norm.data[: len(changed)].copy_(changed)
                rank.norm.data[len(changed) :].fill_(0)
            else:
                rank.load(name, weight)

    recording = recorded(rank, load)
    assert set(recording.misc) == {"norm.weight"}
    assert "norm.weight" not in {name for name, _ in recording.regions()}


def test_a_view_that_is_no_box_goes_whole() -> None:
    parameter = torch.empty(4)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        parameter.copy_(dict(weights)["w"].view(-1)[2:6])

    recording = record(load, {"p": parameter}, {"w": ((3, 4), torch.float32)})
    assert recording.misc == {"w": "(4,) of (3, 4) is not a box"}


def test_tensors_of_which_nothing_lands_on_a_rank_are_listed() -> None:
    rank = EngineRank()
    specs = {name: (shape, torch.bfloat16) for name, shape in CHECKPOINT.items()}
    load = lambda weights: rank.load_weights(e for e in weights if e[0] != "of another rank")  # noqa: E731
    recording = record(
        load, dict(rank.named_parameters()), specs | {"of another rank": ((2,), torch.float32)}
    )
    assert recording.unused == ("of another rank",)


def without(name: str) -> Callable[[EngineRank, str, Tensor], None]:
    return lambda rank, got, weight: None if got == name else rank.load(got, weight)


def twice(rank: EngineRank, name: str, weight: Tensor) -> None:
    rank.load("q_proj.weight" if name == "q_proj.weight" else name, weight)
    if name == "q_proj.weight":
        rank.qkv.data[:1].copy_(weight[:1])


def added(rank: EngineRank, name: str, weight: Tensor) -> None:
    rank.norm.data.add_(weight) if name == "norm.weight" else rank.load(name, weight)


def foreign(rank: EngineRank, name: str, weight: Tensor) -> None:
    weight = torch.ones(HIDDEN) if name == "norm.weight" else weight
    rank.load(name, weight)


@pytest.mark.parametrize(
    ("load_one", "parameter", "problem"),
    [
        (without("k_proj.weight"), "qkv", "has 32 elements that nothing writes"),
        (without(EXPERT.format(1, "down")), "w2", "has 96 elements that nothing writes"),
        (twice, "qkv", "has 8 elements that are written more than once"),
        (added, "norm", "add_.Tensor, which is not a copy"),
        (foreign, "norm", "is copied from something that is not a checkpoint tensor"),
    ],
)
def test_a_loader_whose_layout_is_not_proved_is_refused_by_parameter(
    load_one: Callable[[EngineRank, str, Tensor], None], parameter: str, problem: str
) -> None:
    rank = EngineRank()

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            load_one(rank, name, weight)

    with pytest.raises(LayoutNotRecorded) as refused:
        recorded(rank, load)
    assert refused.value.parameter == parameter
    assert problem in str(refused.value)


def test_parameters_that_the_engine_ties_or_computes_are_named_by_the_caller() -> None:
    rank = EngineRank()
    parameters = dict(rank.named_parameters()) | {"scale": torch.ones(3), "head": rank.embed}
    specs = {name: (shape, torch.bfloat16) for name, shape in CHECKPOINT.items()}
    assert record(rank.load_weights, parameters, specs, unloaded=["scale"]).misc == {}
    with pytest.raises(LayoutNotRecorded, match="scale has 3 elements that nothing writes"):
        record(rank.load_weights, parameters, specs)
