"""Formats of quantized releases are found by name, and nothing is asked of them without a name."""

from typing import get_args

import pytest
import torch
from torch import nn

from offbeat.config.sections.sync_base import WireFormatName
from offbeat.doors import NoSuchPlugin, find_plugins
from offbeat.weight_sync.dtypes import ITEMSIZE, WirePolicy, wire_dtypes
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.wire_format import (
    find_wire_format,
    formats_by_dtype,
    make_policy,
    wire_held,
    wire_metas,
    wire_regions,
    wire_tensors,
)
from offbeat.weight_sync.wire_format_plugin import WireFormat
from tests.support.plain_modules import ModuleSource
from tests.support.recipes import make_config

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPES = {NAME: (200, 130)}
PLAIN = WirePolicy("bfloat16")


@pytest.mark.plugins
def test_a_recipe_chooses_among_the_formats_of_plugins() -> None:
    formats = find_plugins("wire_format")
    names, _ = get_args(WireFormatName)
    assert get_args(names) == tuple(formats)
    assert all(isinstance(each, WireFormat) for each in formats.values())
    assert all(each.dtype in ITEMSIZE and each.canary_prompts > 0 for each in formats.values())
    assert formats_by_dtype() == {each.dtype: each for each in formats.values()}
    for name, each in formats.items():
        config = make_config(sync={"quantize": name})
        assert find_wire_format(name) is each
        assert make_policy(config.sync).quantize == name
        assert wire_dtypes("bfloat16", config.sync) == ("bfloat16", None, each.dtype)


def test_a_format_that_no_package_brings_is_refused_when_weights_are_laid_out() -> None:
    with pytest.raises(NoSuchPlugin, match="wire_format int3"):
        ModuleSource(nn.Linear(2, 2), 64, WirePolicy(quantize="int3"))


def test_without_a_format_tensors_and_regions_are_passed_on_as_they_come() -> None:
    region = TensorRegion(NAME, Region.whole(SHAPES[NAME]), torch.zeros(SHAPES[NAME]))
    named, held = iter([(NAME, region.values)]), iter([region])
    assert wire_tensors(named, PLAIN) is named
    assert wire_regions(held, SHAPES, PLAIN) is held
    assert wire_held([(NAME, region.region)], SHAPES, PLAIN) == [(NAME, region.region)]
    metas = [(NAME, SHAPES[NAME], "float32")]
    assert [*wire_metas(metas, PLAIN)] == [TensorMeta(*metas[0][:2], "bfloat16", "float32")]


@pytest.mark.parametrize("name", [*find_plugins("wire_format")])
def test_metas_tensors_and_regions_of_a_format_are_of_the_same_names(name: str) -> None:
    policy = WirePolicy("bfloat16", quantize=name)
    matrix = torch.randn(SHAPES[NAME], generator=torch.Generator().manual_seed(0))
    metas = [*wire_metas([(NAME, SHAPES[NAME], "float32")], policy)]
    tensors = [*wire_tensors(iter([(NAME, matrix)]), policy)]
    assert [each.name for each in metas] == [each for each, _ in tensors]
    assert [each.shape for each in metas] == [tuple(each.shape) for _, each in tensors]
    whole = TensorRegion(NAME, Region.whole(SHAPES[NAME]), matrix)
    regions = [*wire_regions([whole], SHAPES, policy)]
    held = wire_held([(NAME, whole.region)], SHAPES, policy)
    assert [(each.name, each.region) for each in regions] == held
    for each, (other, values) in zip(regions, tensors, strict=True):
        assert each.name == other
        assert each.values.view(torch.uint8).equal(values.view(torch.uint8))
