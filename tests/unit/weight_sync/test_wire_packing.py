"""Types, packing, views, and memory that is lent."""

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from offbeat.config.sections.sync import ObjectStoreSyncConfig
from offbeat.weight_sync.buffers import Buffers
from offbeat.weight_sync.chunks import GatheredSource, iterate_weights, pack, tensor_views, walk
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import TensorMeta, digest_bytes, plan
from offbeat.weight_sync.object_store import ObjectStoreSender
from offbeat.weight_sync.wire_format import make_policy
from tests.support.plain_modules import ModuleReceiver, ModuleSource
from tests.support.release_parts import receive_release
from tests.support.weight_models import Model, weights


class Router(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 4).to(dtype))
        self.e_score_correction_bias = nn.Parameter(25 + 7e-4 * torch.arange(8.0))


BIAS = "layers.3.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "held", "wire"),
    [
        ("w", "float32", "bfloat16"),
        ("w", "float64", "bfloat16"),
        ("w", "bfloat16", "bfloat16"),
        ("w", "int64", "int64"),
        ("w", "bool", "bool"),
        ("w", "float8_e4m3fn", "float8_e4m3fn"),
        (BIAS, "float32", "float32"),
        (BIAS, "float64", "float32"),
        ("model.layers.3.feed_forward.expert_bias", "float32", "float32"),
        ("model.layers.3.moe.router_bias", "float32", "float32"),
        ("model.layers.3.self_attn.q_proj.bias", "float32", "bfloat16"),
    ],
)
def test_floats_are_rounded_on_the_way_but_for_those_that_would_not_survive(
    name: str, held: str, wire: str
) -> None:
    assert WirePolicy("bfloat16")(name, held) == wire
    assert WirePolicy()(name, held) == held


def test_a_recipe_keeps_what_senders_keep_unless_it_says_otherwise() -> None:
    assert make_policy(ObjectStoreSyncConfig()) == WirePolicy()


def test_a_router_bias_keeps_its_order_through_a_transfer_in_16_bits() -> None:
    """Values 25 + 7e-4 k: in bfloat16 they would all be one."""

    sent, served = Router(torch.float32), Router(torch.bfloat16)
    served.e_score_correction_bias.data.zero_()
    source = ModuleSource(sent, 100, WirePolicy("bfloat16"))
    manifest, digest, chunks, *_ = ObjectStoreSender(source).publish(1)
    receive_release(ModuleReceiver(served), 1, manifest, chunks, digest)
    assert torch.equal(served.e_score_correction_bias, sent.e_score_correction_bias)
    assert len(set(served.e_score_correction_bias.tolist())) == 8
    assert torch.equal(served.weight, sent.weight.bfloat16())


def test_a_manifest_says_what_was_held_and_what_travels() -> None:
    manifest = ModuleSource(Model(1), 64, WirePolicy("bfloat16")).manifest
    types = {spec.name: (spec.source_dtype, spec.dtype) for spec in manifest.tensors}
    assert types["norm.weight"] == ("float64", "bfloat16")
    assert types["half.weight"] == ("bfloat16", "bfloat16")


def test_names_of_the_same_memory_travel_once() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.rand(2, 3))
    module.tied = module.a
    module.alias = nn.Parameter(module.a.data)
    module.part = nn.Parameter(module.a.data[:1])
    module.empty = nn.Parameter(torch.empty(0))
    module.also_empty = nn.Parameter(torch.empty(0))
    found = [name for name, _ in iterate_weights(module)]
    assert found == ["a", "part", "empty", "also_empty"]


def test_a_plan_is_made_without_any_tensor_in_memory() -> None:
    """A terabyte of weights: names, shapes and types are enough."""
    metas = [TensorMeta(f"w{i}", (1 << 19, 1 << 20), "bfloat16") for i in range(1)]
    manifest = plan(metas, 64 << 20)
    assert manifest.nbytes == 1 << 40
    assert ModuleSource(nn.Linear(1 << 20, 1 << 19, device="meta"), 64).manifest.nbytes > 1 << 40


def test_of_gathered_tensors_those_of_one_chunk_are_held_and_of_their_metadata_none() -> None:
    """What comes from other ranks exists until it is packed: a rank never holds the whole model."""
    alive, most = 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for index in range(6):
            made = torch.ones(16)
            weakref.finalize(made, gone)
            alive += 1
            most = max(most, alive)
            yield f"w{index}", made
            del made

    two_bytes = 2 * 16 * 4
    source = GatheredSource(((f"w{i}", (16,), "float32") for i in range(6)), gathered, two_bytes)
    assert most == 0
    sizes = [len(data) for data, _ in source.chunks()]
    assert (sizes, most, alive) == ([two_bytes] * 3, 2, 0)


def test_whatever_was_in_the_memory_before_a_packed_chunk_is_the_same() -> None:
    source = ModuleSource(Model(1), 10**6)
    (chunk,) = walk(source.manifest)
    tensors = dict(iterate_weights(Model(1)))
    packed = [np.full(chunk.nbytes, fill, np.uint8) for fill in (0, 255)]
    digests = [pack(chunk, tensors, into) for into in packed]
    assert digests[0] == digests[1] == digest_bytes(packed[1])
    assert np.array_equal(packed[0], packed[1])


def test_strided_and_converted_tensors_arrive_as_their_values() -> None:
    wide = torch.rand(4, 6)
    manifest = plan([("t", (3, 4), "bfloat16")], 100)
    (chunk,) = walk(manifest)
    into = np.empty(chunk.nbytes, np.uint8)
    pack(chunk, {"t": wide.t()[::2]}, into)
    ((name, view),) = tensor_views(chunk, into)
    assert name == "t" and torch.equal(view, wide.t()[::2].bfloat16())


def test_views_outlive_the_array_they_were_made_of() -> None:
    source = ModuleSource(Model(1), 10**6)
    (chunk,) = walk(source.manifest)
    (data, _) = next(iter(source.chunks()))
    data.flags.writeable = False  # as out of shared memory
    views = dict(tensor_views(chunk, data))
    del data
    gc.collect()
    assert all(torch.equal(view, weights(Model(1))[name]) for name, view in views.items())


def test_a_buffer_comes_back_when_nobody_holds_a_view_of_it() -> None:
    buffers = Buffers()
    first = buffers.lend(64)
    address = first.ctypes.data
    view = torch.from_numpy(first[8:][:8]).view(torch.float32)
    del first
    assert buffers.lend(64).ctypes.data != address, "still looked at"
    del view
    assert address in {array.ctypes.data for array in [buffers.lend(64), buffers.lend(64)]}
