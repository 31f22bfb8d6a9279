"""Compares a run's weights over every leg from its checkpoint to the engines, as far as asked."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.launch.commands.arguments import refuse
from offbeat.launch.initial_model import INITIAL_MODEL
from offbeat.launch.weight_requests import ask
from offbeat.messages.failures import FixableError, OffbeatError
from offbeat.plugins.verify_weights.verification import (
    Leg,
    LegResult,
    compare_export,
    compare_served,
)
from offbeat.runs.directory import CONFIG
from offbeat.trainers.checkpoints.manifest import (
    MANIFEST,
    CheckpointCorrupt,
    read_manifest,
    verify,
)
from offbeat.trainers.receiver_names import file_shapes, name_in_files
from offbeat.trainers.saved_weights import (
    NoSavedWeights,
    SavedWeights,
    readers,
    saved_weights,
)
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.served import ServedWeights

_STATE, _STEP = "state_", "step_"
_ADAPTER_FILE: Final = "adapter_model.safetensors"


class NothingToCompare(FixableError):
    """``offbeat verify-weights`` was given one side of a comparison alone."""

    form = "{} {}. {}"


class VerifiedRun:
    """The checkpoints of a run, or one checkpoint, to compare with."""

    def __init__(self, what: Path, *, checkpoint_needed: bool = True) -> None:
        """Find the newest checkpoint of a run, or take the named directory.

        Raises:
            NoSavedWeights: There is none, and one is needed.
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
            return self._only if version_of(self._only) == version else None
        found = [self.root / f"{kind}{version}" for kind in (_STATE, _STEP)]
        return next((path for path in found if path.is_dir()), None)

    def config(self) -> RunConfig | None:
        """Return the resolved recipe of the run, if the checkpoint lies in one."""
        path = self.run_dir / CONFIG
        return load_recipe(path, []).config if path.is_file() else None

    def _newest(self) -> Path | None:
        found = [path for path in self.root.glob("*_*") if version_of(path) is not None]
        return max(
            found,
            key=lambda path: (version_of(path) or 0, path.name.startswith(_STATE)),
            default=None,
        )


def version_of(checkpoint: Path) -> int | None:
    """Return the weight version in the name of a checkpoint; None for any other directory."""
    for kind in (_STATE, _STEP):
        number = checkpoint.name.removeprefix(kind)
        if checkpoint.name.startswith(kind) and number.isdigit():
            return int(number)
    return None


def verify_export(run: VerifiedRun, against: Path | None) -> list[LegResult]:
    """Compare a checkpoint with a Hugging Face directory: by default the export of its version.

    The directory of a run of adapters is compared twice: its adapters, and the merged model.

    Raises:
        NothingToCompare: There is no directory to compare with.
        NoSavedWeights: A side holds no weights.
        CheckpointCorrupt: A file of the checkpoint is not what was written.
    """
    assert run.checkpoint is not None  # noqa: S101 -- the caller has looked
    saved = _intact(run.checkpoint)
    exported = run.root / f"{_STEP}{version_of(run.checkpoint)}"
    target = against or (exported if exported.is_dir() else None)
    if target is None or target.absolute() == run.checkpoint.absolute():
        problem = "is compared with nothing: its version was not exported"
        fix = "Name a directory with --against, or a live run with --engine"
        raise NothingToCompare(str(run.checkpoint), problem, fix)
    if not file_shapes(target):
        raise NoSavedWeights(str(target), "holds no *.safetensors")
    between = f"{run.checkpoint} and {target}"
    if problem := _rounded_at_random(run, run.checkpoint):
        return [LegResult(Leg.EXPORT, between, problem=problem)]
    if not saved.has_adapters:
        return [_export(between, target, saved.named_like(file_shapes(target)))]
    from offbeat.plugins.lora.lora import ADAPTER_FOLDER  # noqa: PLC0415 -- brings these weights

    folder = target if (target / _ADAPTER_FILE).is_file() else target / ADAPTER_FOLDER
    found = list[LegResult]()
    if (folder / _ADAPTER_FILE).is_file():
        found.append(_export(f"{run.checkpoint} and {folder}", folder, saved.named()))
    if folder != target:
        found.append(_merged_export(run, run.checkpoint, target, saved))
    return found


def verify_engines(run: VerifiedRun, served: Sequence[ServedWeights]) -> list[LegResult]:
    """Compare what each engine serves with its release, and that with the checkpoint of its version."""
    results = list[LegResult]()
    for each in served:
        results += compare_served(each, _reference(run, each.version))
    if not served:
        results.append(LegResult(Leg.LOAD, "no engine", problem="the run has none"))
    return results


def _intact(path: Path) -> SavedWeights:
    """Return the weights of a directory; the files of a training state are verified first.

    A damaged one would be reported as a weight that differs, or by whatever torch finds in it.

    Raises:
        NoSavedWeights: It holds none.
        CheckpointCorrupt: A file is missing, or has another digest than when it was written.
    """
    if (path / MANIFEST).is_file():
        verify(path, read_manifest(path).files)
    return saved_weights(path)


def _rounded_at_random(run: VerifiedRun, checkpoint: Path) -> str | None:
    """Say why float32 masters cannot be compared with what was made of them; None: they can."""
    config = run.config()
    if config is None or config.trainer.backend == "stub" or not checkpoint.name.startswith(_STATE):
        return None
    if config.trainer.optimizer.rounding == "nearest":
        return None
    return (
        f"{checkpoint} holds float32 masters, of which trainer.optimizer.rounding=stochastic made bfloat16 "
        f"weights at random. Compare from an exported model (checkpoints/{_STEP}N)"
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
    if problem := _rounded_at_random(run, path):
        return problem
    try:
        saved = _intact(path)
    except (NoSavedWeights, CheckpointCorrupt) as refused:
        return str(refused)

    def named(manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        return saved.named_like({spec.name: spec.shape for spec in manifest.tensors})

    return named


def _export(between: str, target: Path, named: Iterator[tuple[str, Tensor]]) -> LegResult:
    files = readers(target)
    stored = ((name_in_files(name, files.keys()), tensor) for name, tensor in named)
    return compare_export(between, stored, files)


def _merged_export(
    run: VerifiedRun, checkpoint: Path, target: Path, adapters: SavedWeights
) -> LegResult:
    """Compare a directory with the base model and the adapters added, as the trainer exports them."""
    from offbeat.plugins.lora.release import merged, part_named  # noqa: PLC0415 -- likewise
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
        return name, merged(tensor, a, b, scaling)

    initial = run.run_dir / INITIAL_MODEL
    base = saved_weights(initial if initial.is_dir() else Path(config.model.path))
    return _export(between, target, (with_adapter(name, each) for name, each in base.named()))


def legs_or_exit(
    what: Path, against: Path | None, *, engine: bool, wait_s: float
) -> list[LegResult]:
    """Compare weights over every leg; if nothing can be compared, end the command with code 2.

    With ``engine`` an export is compared if there is one, and a missing one is no failure.
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
