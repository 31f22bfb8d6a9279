"""Layout of an engine's ranks, recorded from its own loader, and the buckets they need.

Trainer ranks plan by this layout, so that all regions of a bucket go to the same engine ranks. An
engine rank selects its buckets by its own regions, not by the plan. So it receives everything it
needs from any release, and nothing else from a release that is planned for its layout.

The module also writes the layout of a run's engines to the run directory, for plans made outside
the run.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from offbeat.messages.failures import OffbeatError
from offbeat.run_files.disk import replacing
from offbeat.weight_sync.buckets import NamedRegion, collect_placements
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Manifest, TensorMeta
from offbeat.weight_sync.region import Placement, Region, union_elements

Needs = Mapping[str, Sequence[Region]]
"""Regions that one rank needs, by tensor. A tensor that is not listed is needed as a whole."""


class EngineLayout(msgspec.Struct, frozen=True):
    """Regions of a checkpoint that each rank of an engine loads."""

    tensors: tuple[str, ...]  # of the checkpoint; every rank needs any other tensor whole
    ranks: tuple[tuple[NamedRegion, ...], ...]

    def needs(self, rank: int) -> Needs:
        """Return the regions that a rank needs. A tensor that its loader skips has no regions."""
        return find_needs(self.tensors, self.ranks[rank])

    def placement(self, tensors: Iterable[TensorMeta]) -> dict[str, Placement]:
        """Return which ranks need which regions of a release's tensors.

        If a tensor's regions do not fit its shape, every rank is listed for the whole tensor.
        Engines then refuse the tensor by name and shape, as on other transports.
        """
        recorded, known = collect_placements(self.ranks), frozenset(self.tensors)
        everybody, nobody = tuple(range(len(self.ranks))), Placement(())
        wholes = dict[tuple[int, ...], Placement]()
        found = dict[str, Placement]()
        for each in tensors:
            whole = Region.whole(each.shape)
            placement = recorded.get(each.name, nobody)
            if each.name in known and all(_fits(part, whole) for part, _ in placement.parts):
                found[each.name] = placement
            else:
                found[each.name] = wholes.setdefault(each.shape, Placement(((whole, everybody),)))
        return found


def find_needs(tensors: Iterable[str], regions: Iterable[NamedRegion]) -> Needs:
    """Return a rank's needs for these tensors, given its regions of them."""
    found = {name: list[Region]() for name in tensors}
    for name, region in regions:
        found[name].append(region)
    return found


def find_needed_buckets(epoch: int, manifest: Manifest, needs: Needs) -> tuple[int, ...]:
    """Return the buckets that hold any region that a rank needs, in ascending order.

    Raises:
        TransferRefused: The release lacks a needed tensor, or a needed region of it.
    """
    pieces = defaultdict[int, list[tuple[int, Region]]](list)
    for piece in manifest.pieces:
        pieces[piece.tensor].append((piece.chunk, piece.region))
    if missing := sorted(needs.keys() - {each.name for each in manifest.tensors}):
        raise TransferRefused(epoch, f"tensor {missing[0]!r}", "not in the release", "needed")
    chosen = set[int]()
    for index, spec in enumerate(manifest.tensors):
        for want in needs.get(spec.name, (Region.whole(spec.shape),)):
            common = [
                (bucket, part)
                for bucket, region in pieces[index]
                if (part := region.intersection(want)) is not None
            ]
            got = union_elements(part for _, part in common)
            if got != want.elements:
                what = f"elements of {spec.name!r}{want}"
                raise TransferRefused(epoch, what, str(got), str(want.elements))
            chosen.update(bucket for bucket, _ in common)
    return tuple(sorted(chosen))


def _fits(part: Region, whole: Region) -> bool:
    return len(part.start) == len(whole.start) and whole.contains(part)


LAYOUT_FILE: Final = "engine_layout.msgpack"


class NoRecordedLayout(OffbeatError):
    """A path has no layout of engines.

    Fix: pass a run with ``generator.backend=vllm`` and ``sync.transport=reshard``.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} holds no recorded layout: {self.problem}. Name the directory of a run with "
            "generator.backend=vllm and sync.transport=reshard, whose first engine records it"
        )


def write_layout(layout: EngineLayout, run_dir: Path) -> None:
    """Write the layout of one engine, which is the layout of all engines. The last write wins.

    Raises:
        OSError: The disk cannot write.
    """
    with replacing(run_dir / LAYOUT_FILE) as staged:
        staged.write_bytes(msgspec.msgpack.encode(layout))


def read_layout(path: Path) -> EngineLayout:
    """Read a layout from a run directory or a file.

    Raises:
        NoRecordedLayout: No layout is found, or the file contains something else.
    """
    file = path / LAYOUT_FILE if path.is_dir() else path
    try:
        layout = msgspec.msgpack.decode(file.read_bytes(), type=EngineLayout)
    except (OSError, msgspec.DecodeError) as error:
        raise NoRecordedLayout(str(file), str(error)) from error
    if not layout.ranks:
        raise NoRecordedLayout(str(file), "it names no rank")
    return layout
