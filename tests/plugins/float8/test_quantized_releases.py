"""Releases in float8 blocks: manifest, digests, deltas, regions of several ranks, read back."""

import pickle
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offbeat.messages.weights import WeightRelease
from offbeat.plugins.delta.kept_release import HeldRelease, rebuilt
from offbeat.plugins.float8.precision import (
    FP8,
    PrecisionRefused,
    UnalignedBlocks,
    find_unquantized_modules,
    is_quantized,
)
from offbeat.plugins.float8.quantize import UnquantizableWeights, dequantize, quantize
from offbeat.plugins.verify_weights.legs import compare_served
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.chunks import GatheredSource, dtype_name
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.errors import CoverageRefused, TransferRefused
from offbeat.weight_sync.manifest import Manifest, digest_bytes, release_digest
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, chunk_cuts, cut_part
from offbeat.weight_sync.region_tensors import join_release
from offbeat.weight_sync.served import ServedWeights
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.wire_format import wire_held, wire_metas, wire_regions
from tests.support.plain_modules import ModuleReceiver, ModuleSource
from tests.support.release_parts import receive_release

BLOCKS = WirePolicy("bfloat16", quantize="fp8_block")
Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
EMBED = "model.embed_tokens.weight"
NORM = "model.layers.0.input_layernorm.weight"
SHAPES = {EMBED: (40, 256), NORM: (256,), Q: (256, 256), ROUTER: (8, 256), DOWN: (256, 300)}
CHUNK_BYTES = 50_000


def trained(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=dice).to(dtype) for name, shape in SHAPES.items()}


def metas(weights: dict[str, Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(each.shape), dtype_name(each)) for name, each in weights.items()]


def published(weights: dict[str, Tensor], policy: WirePolicy = BLOCKS) -> PublishedRelease:
    source = GatheredSource(metas(weights), lambda: iter(weights.items()), CHUNK_BYTES, policy)
    return ObjectStoreSender(source).publish(1)


class Engine(nn.Module):
    """Holds tensors as an engine of float8 blocks does."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        for each in manifest.tensors:
            dtype = getattr(torch, each.dtype)
            place = nn.Parameter(torch.zeros(each.shape).to(dtype), requires_grad=False)
            self.register_parameter(each.name.replace(".", "/"), place)

    def held(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): each.data for name, each in self.named_parameters()}


def loaded(release: PublishedRelease) -> dict[str, Tensor]:
    """Load a release as engines do, under the checks of a transaction."""
    engine = Engine(release.manifest)
    names = [spec.name.replace(".", "/") for spec in release.manifest.tensors]
    specs = zip(release.manifest.tensors, names, strict=True)
    manifest = msgspec.structs.replace(
        release.manifest,
        tensors=tuple(msgspec.structs.replace(spec, name=name) for spec, name in specs),
    )
    receive_release(ModuleReceiver(engine), 1, manifest, release.handles, release.digest)
    return engine.held()


def same(a: Tensor, b: Tensor) -> bool:
    first, second = (each.contiguous().view(torch.uint8) for each in (a, b))
    return a.dtype == b.dtype and first.equal(second)


def test_matrices_of_layers_are_quantized_and_nothing_else_is() -> None:
    made = {each.name: each for each in wire_metas(metas(trained(0)), BLOCKS)}
    assert made[Q].dtype == made[DOWN].dtype == FP8
    assert made[Q + "_scale_inv"].shape == (2, 2)
    assert made[DOWN + "_scale_inv"].shape == (2, 3)
    assert made[DOWN + "_scale_inv"].dtype == "float32"  # not rounded by wire_dtype
    assert [made[name].dtype for name in (EMBED, NORM, ROUTER)] == ["bfloat16"] * 3
    assert len(made) == len(SHAPES) + 2
    assert find_unquantized_modules(SHAPES.items()) == [
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.10.mlp.experts.3.gate_proj.weight", (128, 256), True),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 256), True),
        ("model.language_model.layers.0.mlp.up_proj.weight", (128, 128), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 128, 256), False),
        ("model.layers.0.self_attn.q_proj.bias", (128,), False),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", (128, 128), False),
        ("model.layers.0.mixer.in_proj.weight", (128, 128), False),
        ("lm_head.weight", (1000, 128), False),
    ],
)
def test_what_is_quantized_follows_from_the_name(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_quantized(name, shape) is expected


def test_an_engine_gets_the_bytes_of_the_quantizer() -> None:
    weights = trained(1)
    served = loaded(published(weights))
    for name in (Q, DOWN):
        values, scales = quantize(name, weights[name])
        assert same(served[name], values)
        assert same(served[name + "_scale_inv"], scales)
    assert same(served[ROUTER], weights[ROUTER].bfloat16())


def test_equal_weights_have_equal_digests_and_a_moved_value_has_another() -> None:
    weights = trained(1)
    assert published(weights).digest == published(trained(1)).digest
    weights[Q][3, 5] *= 1.5
    assert published(weights).digest != published(trained(1)).digest


def test_weights_that_are_quantized_already_travel_as_bytes() -> None:
    weights = trained(2)
    values, scales = quantize(Q, weights[Q])
    held = {Q: values, Q + "_scale_inv": scales, NORM: weights[NORM]}
    served = loaded(published(held, BLOCKS))
    assert same(served[Q], values)
    assert same(served[Q + "_scale_inv"], scales)
    assert served[NORM].dtype == torch.bfloat16
    without = loaded(published(held, WirePolicy("bfloat16")))  # sync.quantize is not needed
    assert same(without[Q + "_scale_inv"], scales)


def test_an_engine_without_blocks_refuses_a_quantized_release() -> None:
    release = published(trained(1))
    plain = Engine(published(trained(1), WirePolicy("bfloat16")).manifest)
    with pytest.raises((CoverageRefused, TransferRefused)):
        ModuleReceiver(plain).begin(1, release.manifest)


def test_every_tensor_that_cannot_be_quantized_is_named_in_one_error() -> None:
    weights = trained(0, torch.float64)
    with pytest.raises(PrecisionRefused) as refused:
        list(wire_metas(metas(weights), BLOCKS))
    text = str(pickle.loads(pickle.dumps(refused.value)))  # noqa: S301 -- its own bytes
    assert "2 tensors cannot be sent" in text
    assert f"float64 to fp8_block is not converted: {Q}, {DOWN}" in text


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_are_refused_and_the_other_ranks_gather_to_the_end(value: float) -> None:
    weights = trained(0)
    weights[Q][200, 10] = value
    gathered = list[str]()

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            gathered.append(name)
            yield name, tensor

    source = GatheredSource(metas(weights), named, CHUNK_BYTES, BLOCKS)
    with pytest.raises(UnquantizableWeights, match=r"q_proj\.weight: \[128:256, 0:128\]"):
        list(source.chunks())
    assert gathered == list(weights)


def test_a_delta_between_quantized_releases_rebuilds_the_release() -> None:
    weights = trained(3)
    source = GatheredSource(metas(weights), lambda: iter(weights.items()), CHUNK_BYTES, BLOCKS)

    sender = ObjectStoreSender(source, delta=True)
    first = sender.publish(1)
    base = HeldRelease(first.digest, first.manifest, [each.copy() for each in first.handles])
    weights[Q][5, :20] *= -1
    second = sender.publish(2)
    assert second.digest != first.digest
    assert second.delta is not None
    again = rebuilt(1, base, second.manifest, second.delta.chunks)
    assert [digest_bytes(each) for each in again] == list(second.manifest.chunk_digests)
    assert sum(map(len, second.delta.chunks)) < second.manifest.nbytes / 2


class Ranks:
    """Ranks of a trainer that cut every tensor by rows."""

    def __init__(self, weights: dict[str, Tensor], count: int) -> None:
        shapes = {name: tuple(each.shape) for name, each in weights.items()}
        self.shapes = shapes
        self.held = [
            [
                TensorRegion(name, region, weights[name][region.slices])
                for name, shape in shapes.items()
                for region in [cut_part(shape, 0, chunk_cuts(shape[0], count), rank)]
            ]
            for rank in range(count)
        ]

    def names(self, rank: int) -> list[tuple[str, Region]]:
        return wire_held(((n, r) for n, r, _ in self.held[rank]), self.shapes, BLOCKS)


def test_ranks_that_quantize_their_own_rows_send_the_release_of_one_rank() -> None:
    weights = trained(4)
    ranks = Ranks(weights, 2)
    tensors = list(wire_metas(metas(weights), BLOCKS))
    plan = plan_buckets(tensors, [ranks.names(rank) for rank in range(2)], 20_000)
    buckets, digests = dict[int, np.ndarray](), dict[int, str]()
    for rank in range(2):

        def held(rank: int = rank) -> Iterator[TensorRegion]:
            return wire_regions(ranks.held[rank], ranks.shapes, BLOCKS)

        for each in HeldShards(plan, rank, held).pack_buckets(lambda _, n: np.empty(n, np.uint8)):
            assert isinstance(each.data, np.ndarray)
            buckets[each.bucket], digests[each.bucket] = each.data, each.digest
    sealed = plan.manifest.seal([digests[index] for index in sorted(digests)])
    digest = release_digest(sealed, sealed.chunk_digests)
    release = WeightRelease(1, digest, sealed, (), sealed.nbytes)
    whole = join_release(release, [buckets[index] for index in sorted(buckets)])
    release = PublishedRelease(whole.manifest, whole.digest, whole.chunks)
    alone = loaded(published(weights))
    together = loaded(release)
    assert together.keys() == alone.keys()
    assert all(same(together[name], alone[name]) for name in alone)


def test_regions_that_cut_blocks_are_named_in_one_error() -> None:
    ranks = Ranks(trained(4), 3)  # 256 rows in parts of 86
    with pytest.raises(UnalignedBlocks) as refused:
        ranks.names(0)
    text = str(pickle.loads(pickle.dumps(refused.value)))  # noqa: S301 -- its own bytes
    assert "2 regions" in text
    assert f"{Q}[0:86, 0:256], {DOWN}[0:86, 0:300]" in text
    with pytest.raises(UnalignedBlocks):
        list(wire_regions(ranks.held[1], ranks.shapes, BLOCKS))


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_a_checkpoint_is_compared_with_what_was_quantized_of_it(held: torch.dtype) -> None:
    """The state of a 16-bit trainer has float32 masters, and what it sent was rounded before."""
    masters = trained(5)
    weights = {name: each.to(held) for name, each in masters.items()}
    release = published(weights)
    sealed = release.manifest
    served = ServedWeights("engine", 1, manifest=sealed, problem="packed for kernels")
    wire, _ = compare_served(served, lambda _: iter(masters.items()))
    assert wire.is_equal
    masters[DOWN][255, 299] += 1
    wire, _ = compare_served(served, lambda _: iter(masters.items()))
    assert not wire.is_equal
    assert DOWN in str(wire)


def test_a_module_is_quantized_under_its_own_names() -> None:
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Module()])
    module.layers[0].up_proj = nn.Linear(128, 256, bias=True)
    source = ModuleSource(module, CHUNK_BYTES, BLOCKS)
    names = [spec.name for spec in source.manifest.tensors]
    weight = "layers.0.up_proj.weight"
    assert names == [weight, weight + "_scale_inv", "layers.0.up_proj.bias"]
    values = dequantize(quantize(weight, module.layers[0].up_proj.weight), torch.float32)
    assert (values - module.layers[0].up_proj.weight).abs().max() < 0.01
