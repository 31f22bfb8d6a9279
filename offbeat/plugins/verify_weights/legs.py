"""Compares a run's weights over the requested legs from its checkpoint to the engines.

Locates a wrong weight between a trainer's checkpoint and an engine, by the leg that changed it.

    checkpoint --export--> Hugging Face directory
    checkpoint --wire----> release that the engine verified --load--> tensors that the engine serves

The digests of its chunks identify a release. The engine compared them with the received chunks. So
the load leg needs no checkpoint: the engine packs its served tensors again. The wire leg packs the
checkpoint as the trainer packs a release.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.launch.commands.arguments import refuse
from offbeat.launch.initial_model import INITIAL_MODEL
from offbeat.launch.read_backs import ask
from offbeat.messages.failures import FixableError, OffbeatError
from offbeat.runs.directory import CONFIG
from offbeat.trainers.checkpoints.manifest import (
    MANIFEST,
    CheckpointCorrupt,
    read_manifest,
    verify,
)
from offbeat.trainers.receiver_names import file_shapes, name_in_files
from offbeat.trainers.saved_weights import NoSavedWeights, SavedWeights, open_saved_weights, readers
from offbeat.weight_sync.chunks import (
    ReleasePart,
    WeightChunk,
    split_release,
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
    """A part of the way from a checkpoint to the served weights of an engine."""

    EXPORT = "export"
    WIRE = "wire"
    LOAD = "load"


class LegResult(NamedTuple):
    """Outcome of the comparison over one leg."""

    leg: Leg
    between: str  # the two sides, for people
    difference: TensorDifference | None = None
    problem: str = ""  # why it could not be compared; empty: it was
    was_asked: bool = True  # False: compared only if possible

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
    """Compare the weights of a checkpoint with tensors of files, rounded like the files.

    Args:
        between: The two sides, for people.
        saved: Weights of the checkpoint, under the names of the files.
        files: Reads each tensor of the files, by name, without tensors tied to another one.
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
    """Compare a checkpoint with a release, and the release with the engine's served weights.

    Args:
        served: Answer of the engine.
        named: Iterates over the checkpoint's weights under the names of the release. Or a string:
            why this version has no checkpoint.
    """
    manifest, where = served.manifest, f"{served.engine}, version {served.version}"
    if manifest is None or served.version is None:
        problem = served.problem or "the engine serves no release of this run"
        return [LegResult(leg, where, problem=problem) for leg in (Leg.WIRE, Leg.LOAD)]
    if isinstance(named, str):
        wire, saved = LegResult(Leg.WIRE, where, problem=named), None
    else:
        saved, lacking = _pack_saved(manifest, named(manifest))
        wire = _wire(where, manifest, served, saved, lacking)
    return [wire, _load(where, manifest, served, saved)]


def _pack_saved(
    manifest: Manifest, named: Iterator[tuple[str, Tensor]]
) -> tuple[PackedWeights, tuple[str, ...]]:
    """Pack a checkpoint's weights in any order. Also return the names that it lacks."""
    chunks, held = list(walk(manifest)), dict[str, Tensor]()
    specs, seen = {spec.name: spec for spec in manifest.tensors}, set[str]()
    parts = dict[str, list[ReleasePart]]()
    for part in split_release(manifest):
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
    """Yield the tensors of a release in the trainer's types, or quantized like the release."""
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
    for part in split_release(manifest):
        name = part.name
        if part.chunk == chunk.index and name in wants and name in gots:
            of = part.tensor, part.region
            found = fingerprint_difference(wants[name], gots[name], of)
            if found is not None:
                return found
    return None


def _of_chunk(chunk: WeightChunk, got: str, want: str) -> TensorDifference:
    """Return the difference of a chunk, if its tensors cannot be compared one by one."""
    return TensorDifference(
        chunk.tensors, "", f"digest {got} of chunk {chunk.index}, expected {want}"
    )


_STATE, _STEP = "state_", "step_"
_ADAPTER_FILE: Final = "adapter_model.safetensors"


class NothingToCompare(FixableError):
    """``offbeat verify-weights`` got only one side of a comparison.

    Fix: add ``--against`` or ``--engine``.
    """

    form = "{} {}. {}"


class VerifiedRun:
    """The checkpoints of a run, or one checkpoint, to compare with."""

    def __init__(self, what: Path, *, checkpoint_needed: bool = True) -> None:
        """Find the newest checkpoint of a run, or use the named directory.

        Raises:
            NoSavedWeights: No checkpoint exists, and one is needed.
        """
        is_run = (what / CONFIG).is_file()
        self.root = what / "checkpoints" if is_run else what.absolute().parent
        self.run_dir = what if is_run else self.root.parent
        self._only = None if is_run else what
        self.checkpoint = self._newest() if is_run else what
        if self.checkpoint is None and checkpoint_needed:
            raise NoSavedWeights(str(self.root), "holds no checkpoint")

    def of_version(self, version: int) -> Path | None:
        """Return the checkpoint of a version: the trainer's state, else the exported model."""
        if self._only is not None:
            return self._only if parse_version(self._only) == version else None
        found = [self.root / f"{kind}{version}" for kind in (_STATE, _STEP)]
        return next((path for path in found if path.is_dir()), None)

    def config(self) -> RunConfig | None:
        """Return the resolved recipe of the run, or None if the checkpoint is not in a run."""
        path = self.run_dir / CONFIG
        return load_recipe(path, []).config if path.is_file() else None

    def _newest(self) -> Path | None:
        found = [path for path in self.root.glob("*_*") if parse_version(path) is not None]
        return max(
            found,
            key=lambda path: (parse_version(path) or 0, path.name.startswith(_STATE)),
            default=None,
        )


def parse_version(checkpoint: Path) -> int | None:
    """Return the weight version in the name of a checkpoint, or None for any other directory."""
    for kind in (_STATE, _STEP):
        number = checkpoint.name.removeprefix(kind)
        if checkpoint.name.startswith(kind) and number.isdigit():
            return int(number)
    return None


def verify_export(run: VerifiedRun, against: Path | None) -> list[LegResult]:
    """Compare a checkpoint with a Hugging Face directory: by default the export of its version.

    The directory of a run of adapters is compared twice: its adapters, and the merged model.

    Raises:
        NothingToCompare: No directory to compare with was given or exported.
        NoSavedWeights: A side holds no weights.
        CheckpointCorrupt: A file of the checkpoint differs from the written one.
    """
    assert run.checkpoint is not None  # noqa: S101 -- the caller has looked
    saved = _intact(run.checkpoint)
    exported = run.root / f"{_STEP}{parse_version(run.checkpoint)}"
    target = against or (exported if exported.is_dir() else None)
    if target is None or target.absolute() == run.checkpoint.absolute():
        problem = "is compared with nothing: its version was not exported"
        fix = "Name a directory with --against, or a live run with --engine"
        raise NothingToCompare(str(run.checkpoint), problem, fix)
    if not file_shapes(target):
        raise NoSavedWeights(str(target), "holds no *.safetensors")
    between = f"{run.checkpoint} and {target}"
    if problem := _explain_rounding(run, run.checkpoint):
        return [LegResult(Leg.EXPORT, between, problem=problem)]
    if not saved.has_adapters:
        return [_export(between, target, saved.iterate_like(file_shapes(target)))]
    from offbeat.plugins.lora.lora import ADAPTER_FOLDER  # noqa: PLC0415 -- brings these weights

    folder = target if (target / _ADAPTER_FILE).is_file() else target / ADAPTER_FOLDER
    found = list[LegResult]()
    if (folder / _ADAPTER_FILE).is_file():
        found.append(_export(f"{run.checkpoint} and {folder}", folder, saved.named()))
    if folder != target:
        found.append(_compare_merged(run, run.checkpoint, target, saved))
    return found


def verify_engines(run: VerifiedRun, served: Sequence[ServedWeights]) -> list[LegResult]:
    """Compare each engine's weights with its release, and the release with its checkpoint."""
    results = list[LegResult]()
    for each in served:
        results += compare_served(each, _reference(run, each.version))
    if not served:
        results.append(LegResult(Leg.LOAD, "no engine", problem="the run has none"))
    return results


def _intact(path: Path) -> SavedWeights:
    """Return the weights of a directory. Verify the files of a training state first.

    Otherwise a damaged file would be reported as a differing weight, or by an error of torch.

    Raises:
        NoSavedWeights: It holds none.
        CheckpointCorrupt: A file is missing, or its digest has changed since it was written.
    """
    if (path / MANIFEST).is_file():
        verify(path, read_manifest(path).files)
    return open_saved_weights(path)


def _explain_rounding(run: VerifiedRun, checkpoint: Path) -> str | None:
    """Return why float32 masters cannot be compared with weights made from them, else None."""
    config = run.config()
    if config is None or config.trainer.backend == "stub" or not checkpoint.name.startswith(_STATE):
        return None
    if config.trainer.optimizer.rounding == "nearest":
        return None
    return (
        f"{checkpoint} has float32 master weights, from which "
        "trainer.optimizer.rounding=stochastic made bfloat16 weights at random. Compare from "
        f"an exported model (checkpoints/{_STEP}N)"
    )


def _reference(
    run: VerifiedRun, version: int | None
) -> Callable[[Manifest], Iterator[tuple[str, Tensor]]] | str:
    path = None if version is None else run.of_version(version)
    if path is None:
        return (
            f"no checkpoint of version {version} below {run.root}. Have every version saved: "
            f"offbeat train --resume {run.run_dir} checkpoint.interval=1, then pause it "
            f"(offbeat control {run.run_dir} pause)"
        )
    if problem := _explain_rounding(run, path):
        return problem
    try:
        saved = _intact(path)
    except (NoSavedWeights, CheckpointCorrupt) as refused:
        return str(refused)

    def iterate(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        return saved.iterate_like({spec.name: spec.shape for spec in manifest.tensors})

    return iterate


def _export(between: str, target: Path, named: Iterator[tuple[str, Tensor]]) -> LegResult:
    files = readers(target)
    stored = ((name_in_files(name, files.keys()), tensor) for name, tensor in named)
    return compare_export(between, stored, files)


def _compare_merged(
    run: VerifiedRun, checkpoint: Path, target: Path, adapters: SavedWeights
) -> LegResult:
    """Compare a directory with the base model plus adapters, merged as the trainer exports them."""
    from offbeat.plugins.lora.release import merge_matrix, part_named  # noqa: PLC0415 -- likewise
    from offbeat.plugins.lora.section import lora_section  # noqa: PLC0415 -- brings these weights

    between, config = f"{checkpoint} merged and {target}", run.config()
    if config is None or not model_is_frozen(config):
        problem = f"{run.run_dir / CONFIG} names no base model and trainer.lora"
        return LegResult(Leg.EXPORT, between, problem=problem)
    parts = dict[tuple[str, str], Tensor]()
    for name, tensor in adapters.named():
        part = part_named(name)
        parts |= {} if part is None else {(part.module, part.side): tensor}
    lora = lora_section(config.trainer)
    dtype, scaling = getattr(torch, config.model.dtype), lora.alpha / lora.rank

    def with_adapter(name: str, base: Tensor) -> tuple[str, Tensor]:
        module = name.removesuffix(".weight")
        tensor = base.to(dtype) if base.is_floating_point() else base
        if (module, "A") not in parts:
            return name, tensor
        a, b = (parts[module, side].to(dtype) for side in "AB")
        return name, merge_matrix(tensor, a, b, scaling)

    initial = run.run_dir / INITIAL_MODEL
    base = open_saved_weights(initial if initial.is_dir() else Path(config.model.path))
    return _export(between, target, (with_adapter(name, each) for name, each in base.named()))


def legs_or_exit(
    what: Path, against: Path | None, *, engine: bool, wait_s: float
) -> list[LegResult]:
    """Compare weights over every leg. If nothing can be compared, end the command with code 2.

    With ``engine`` an export is compared if it exists. A missing export is not a failure then.
    """
    results = list[LegResult]()
    try:
        run = VerifiedRun(what, checkpoint_needed=not engine or against is not None)
        try:
            if run.checkpoint is not None:
                results += verify_export(run, against)
        except (NothingToCompare, NoSavedWeights) as missing:
            if not engine:
                raise
            is_export = isinstance(missing, NothingToCompare)
            problem = f"no export ({missing})" if is_export else str(missing)
            at = str(run.checkpoint)
            results.append(LegResult(Leg.EXPORT, at, problem=problem, was_asked=False))
        if engine:
            results += verify_engines(run, ask(run.run_dir, wait_s))
    except (OffbeatError, OSError) as error:
        refuse(error)
    return results
