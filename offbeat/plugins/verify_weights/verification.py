"""Locates a wrong weight between a trainer's checkpoint and an engine, by the leg that changed it.

    checkpoint --export--> Hugging Face directory
    checkpoint --wire----> release that the engine verified --load--> tensors that the engine serves

A release is known by the digests of its chunks, which the engine compared with what arrived. So the
load leg needs no checkpoint: the engine packs what it serves once more. The wire leg packs the
checkpoint as the trainer packs a release.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.weight_sync.chunks import (
    ReleasePart,
    WeightChunk,
    parts_of,
    walk,
)
from offbeat.weight_sync.fingerprints import (
    PackedWeights,
    fingerprint_chunk,
    fingerprint_difference,
    tensor_difference,
)
from offbeat.weight_sync.manifest import Manifest, TensorSpec
from offbeat.weight_sync.served import ServedWeights, TensorDifference, TensorFingerprint
from offbeat.weight_sync.wire_format import formats_by_dtype


class Leg(enum.StrEnum):
    """A part of the way from a checkpoint to what an engine computes with."""

    EXPORT = "export"
    WIRE = "wire"
    LOAD = "load"


class LegResult(NamedTuple):
    """Outcome of the comparison over one leg."""

    leg: Leg
    between: str  # what was compared, for people
    difference: TensorDifference | None = None
    problem: str = ""  # why it could not be compared; empty: it was
    was_asked: bool = True  # False: it would have been compared if it could be

    @property
    def is_equal(self) -> bool:
        return self.difference is None and not self.problem

    def __str__(self) -> str:
        said = f"not compared: {self.problem}" if self.problem else "equal"
        said = said if self.difference is None else f"DIFFERS: {self.difference}"
        return f"{self.leg:8}{self.between}: {said}"


def compare_export(
    between: str, saved: Iterable[tuple[str, Tensor]], files: Mapping[str, Callable[[], Tensor]]
) -> LegResult:
    """Compare the weights of a checkpoint with tensors of files, rounded as those are.

    Args:
        between: What is compared.
        saved: Weights of the checkpoint, under the names of the files.
        files: Reads each tensor of the files, by name; what ties to another one is left out.
    """
    first: TensorDifference | None = None
    seen = set[str]()
    for name, tensor in saved:
        seen.add(name)
        if name not in files:
            found = TensorDifference(name, "", "missing in the directory")
        else:
            got = files[name]()
            found = tensor_difference(name, tensor.to(got.dtype), got)
        first = first or found
    for name in sorted(files.keys() - seen):
        first = first or TensorDifference(name, "", "no weight of the checkpoint")
    return LegResult(Leg.EXPORT, f"{between}, {len(seen)} tensors", first)


def compare_served(
    served: ServedWeights, named: Callable[[Manifest], Iterator[tuple[str, Tensor]]] | str
) -> list[LegResult]:
    """Compare a checkpoint with a release, and the release with what an engine serves.

    Args:
        served: Answer of the engine.
        named: Iterates over the checkpoint's weights under the names of the release; or why there
            is no checkpoint of this version.
    """
    manifest, where = served.manifest, f"{served.engine}, version {served.version}"
    if manifest is None or served.version is None:
        problem = served.problem or "the engine serves no release of this run"
        return [LegResult(leg, where, problem=problem) for leg in (Leg.WIRE, Leg.LOAD)]
    if isinstance(named, str):
        wire, saved = LegResult(Leg.WIRE, where, problem=named), None
    else:
        saved, lacking = _saved(manifest, named(manifest))
        wire = _wire(where, manifest, served, saved, lacking)
    return [wire, _load(where, manifest, served, saved)]


def _saved(
    manifest: Manifest, named: Iterator[tuple[str, Tensor]]
) -> tuple[PackedWeights, tuple[str, ...]]:
    """Pack a checkpoint's weights in whatever order they come; return the names it lacks, too."""
    chunks, held = list(walk(manifest)), dict[str, Tensor]()
    specs, seen = {spec.name: spec for spec in manifest.tensors}, set[str]()
    parts = dict[str, list[ReleasePart]]()
    for part in parts_of(manifest):
        parts.setdefault(part.tensor, []).append(part)
    waiting = [len(chunk.specs) for chunk in chunks]
    digests = [""] * len(chunks)
    of_chunk: list[list[TensorFingerprint]] = [[] for _ in chunks]
    for name, source in _as_released(named, specs):
        if name in seen:
            continue
        seen.add(name)
        for part in parts.get(name, ()):
            held[part.name] = source[part.region.slices]
            waiting[part.chunk] -= 1
            if waiting[part.chunk]:
                continue
            chunk = chunks[part.chunk]
            digests[chunk.index], of_chunk[chunk.index] = fingerprint_chunk(chunk, held)
            for each in chunk.names:
                del held[each]
    lacking = [n for c in chunks if waiting[c.index] for n in c.names if n not in held]
    fingerprints = tuple(each for several in of_chunk for each in several)
    return PackedWeights(tuple(digests), fingerprints), tuple(lacking)


def _as_released(
    named: Iterator[tuple[str, Tensor]], specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a release has, in the trainer's types, or quantized as it was."""
    formats = formats_by_dtype()
    for name, tensor in named:
        spec = specs.get(name)
        if spec is None or tuple(tensor.shape) != spec.shape:
            continue
        source = tensor.to(getattr(torch, spec.source_dtype or spec.dtype))
        wire_format = formats.get(spec.dtype)
        if wire_format is None or spec.source_dtype in ("", spec.dtype):
            yield name, source
        else:
            yield from wire_format.tensors([(name, source)])


def _wire(
    where: str,
    manifest: Manifest,
    served: ServedWeights,
    saved: PackedWeights,
    lacking: tuple[str, ...],
) -> LegResult:
    for chunk in walk(manifest):
        got, want = manifest.chunk_digests[chunk.index], saved.chunk_digests[chunk.index]
        if got == want:
            continue
        absent = [name for name in chunk.names if name in lacking]
        if absent:
            found = TensorDifference(absent[0], "", "released, and no weight of the checkpoint")
        else:
            is_served = not served.problem and served.chunk_digests[chunk.index] == got
            found = _first(manifest, chunk, saved, served) if is_served else None
            found = found or _of_chunk(chunk, got, want)
        return LegResult(Leg.WIRE, where, found)
    return LegResult(Leg.WIRE, where)


def _load(
    where: str, manifest: Manifest, served: ServedWeights, saved: PackedWeights | None
) -> LegResult:
    if served.problem:
        return LegResult(Leg.LOAD, where, problem=served.problem)
    for chunk in walk(manifest):
        got, want = served.chunk_digests[chunk.index], manifest.chunk_digests[chunk.index]
        if got != want:
            found = _first(manifest, chunk, saved, served) or _of_chunk(chunk, got, want)
            return LegResult(Leg.LOAD, where, found)
    return LegResult(Leg.LOAD, where, served.differences[0] if served.differences else None)


def _first(
    manifest: Manifest, chunk: WeightChunk, saved: PackedWeights | None, served: ServedWeights
) -> TensorDifference | None:
    """Return the first difference between checkpoint and engine in the tensors of a chunk."""
    wants = {each.name: each for each in saved.fingerprints} if saved else {}
    gots = {each.name: each for each in served.fingerprints}
    for part in parts_of(manifest):
        name = part.name
        if part.chunk == chunk.index and name in wants and name in gots:
            of = part.tensor, part.region
            found = fingerprint_difference(wants[name], gots[name], of)
            if found is not None:
                return found
    return None


def _of_chunk(chunk: WeightChunk, got: str, want: str) -> TensorDifference:
    """Return the difference of a chunk whose tensors cannot be compared one by one."""
    return TensorDifference(
        chunk.tensors, "", f"digest {got} of chunk {chunk.index}, expected {want}"
    )
