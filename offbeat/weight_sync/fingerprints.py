"""Comparison of weights by tensor and region: bit by bit, or by digests of regions.

Two processes that do not share memory compare fingerprints, which show the first region of about a
megabyte that differs. If both tensors are in one process, the comparison finds the smallest box
around all differing elements. Equal means equal bits: a NaN equals itself, but 0.0 differs from
-0.0.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from offbeat.weight_sync.chunks import (
    WeightChunk,
    as_bytes,
    dtype_name,
    pack,
    split_release,
    tensor_views,
    walk,
)
from offbeat.weight_sync.dtypes import ITEMSIZE
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.served import TensorDifference, TensorFingerprint

REGION_BYTES: Final = 2**20
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReadBack(NamedTuple):
    """Weights that an engine serves, under the names of the release."""

    tensors: Mapping[str, Tensor]
    differences: tuple[TensorDifference, ...] = ()  # found by the engine itself


class PackedWeights(NamedTuple):
    """Digests of weights that were packed like a release."""

    chunk_digests: tuple[str, ...]
    fingerprints: tuple[TensorFingerprint, ...]  # in the order of the manifest


def fingerprint_release(manifest: Manifest, tensors: Mapping[str, Tensor]) -> PackedWeights:
    """Pack tensors like a release and return the digests of chunks and tensors.

    Raises:
        KeyError: A tensor is missing.
    """
    digests, fingerprints = list[str](), list[TensorFingerprint]()
    sent = {part.name: tensors[part.tensor][part.region.slices] for part in split_release(manifest)}
    for chunk in walk(manifest):
        digest, of_chunk = fingerprint_chunk(chunk, sent)
        digests.append(digest)
        fingerprints += of_chunk
    return PackedWeights(tuple(digests), tuple(fingerprints))


def fingerprint_chunk(
    chunk: WeightChunk, tensors: Mapping[str, Tensor]
) -> tuple[str, list[TensorFingerprint]]:
    """Pack a chunk as a sender does. Return its digest and the fingerprints of its tensors."""
    into = np.empty(chunk.nbytes, np.uint8)
    digest = pack(chunk, tensors, into)
    return digest, [fingerprint(name, view) for name, view in tensor_views(chunk, into)]


def fingerprint(name: str, tensor: Tensor) -> TensorFingerprint:
    """Return the fingerprint of a tensor on any device."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor)
    data = as_bytes(tensor.detach().cpu()).numpy()
    digests, start = list[str](), 0
    for region in _regions(shape, dtype):
        end = start + region.elements * tensor.element_size()
        digests.append(xxhash.xxh3_128_hexdigest(data[start:end].data))
        start = end
    return TensorFingerprint(name, shape, dtype, tuple(digests))


def fingerprint_difference(
    want: TensorFingerprint, got: TensorFingerprint, of: tuple[str, Region] | None = None
) -> TensorDifference | None:
    """Return the first region in which two fingerprints differ, or None.

    ``of`` has the name and region of the fingerprinted tensor, or is None for a whole tensor.
    """
    tensor, origin = (want.name, Region.whole(want.shape)) if of is None else (of[0], of[1])
    if problem := _differing_form((want.shape, want.dtype), (got.shape, got.dtype)):
        return TensorDifference(tensor, str(origin), problem)
    regions = _regions(want.shape, want.dtype)
    for region, first, second in zip(regions, want.digests, got.digests, strict=True):
        if first != second:
            differing = sum(a != b for a, b in zip(want.digests, got.digests, strict=True))
            detail = (
                f"digest {second}, expected {first}; {differing} of {len(regions)} regions differ"
            )
            start = tuple(a + b for a, b in zip(origin.start, region.start, strict=True))
            return TensorDifference(tensor, str(Region.at(start, region.shape)), detail)
    return None


def tensor_difference(
    name: str, want: Tensor, got: Tensor, origin: tuple[int, ...] | None = None
) -> TensorDifference | None:
    """Return the smallest box around all elements whose bits differ, or None if all are equal.

    ``origin`` is where the values start in the tensor, or None if they are the whole tensor.
    """
    forms = ((tuple(each.shape), dtype_name(each)) for each in (want, got))
    if problem := _differing_form(*forms):
        return TensorDifference(name, "", problem)
    bits = _BITS[want.element_size()]
    differing = want.contiguous().view(bits).ne(got.contiguous().view(bits))
    count = int(differing.sum())
    if not count:
        return None
    start, stop = list[int](), list[int]()
    for axis in range(differing.ndim):
        others = tuple(each for each in range(differing.ndim) if each != axis)
        hit = (differing.any(dim=others) if others else differing).nonzero()
        start.append(int(hit[0]))
        stop.append(int(hit[-1]) + 1)
    at = tuple(int(each) for each in differing.nonzero()[0])
    detail = (
        f"{count} of {want.numel()} elements differ; the first is {got[at].item()}, "
        f"expected {want[at].item()}"
    )
    box = Region(tuple(start), tuple(stop))
    if origin is not None:
        first = tuple(map(sum, zip(origin, start, strict=True)))
        box = Region.at(first, box.shape)
    return TensorDifference(name, str(box), detail)


def _regions(shape: tuple[int, ...], dtype: str) -> list[Region]:
    return Region.whole(shape).slice_rows(REGION_BYTES // ITEMSIZE[dtype])


def _differing_form(
    want: tuple[tuple[int, ...], str], got: tuple[tuple[int, ...], str]
) -> str | None:
    if want == got:
        return None
    return f"shape {got[0]} of {got[1]}, expected {want[0]} of {want[1]}"
