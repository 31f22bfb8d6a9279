"""Writes the weights of a training checkpoint as the initial model directory of another run.

Optimizer state is not copied, because moments belong to the gradients of the earlier run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.messages.failures import FixableError
from offbeat.trainers.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    read_manifest,
    verify,
)
from offbeat.trainers.checkpoints.weight_files import replace_directory, write_weights
from offbeat.trainers.receiver_names import Shapes, file_shapes, name_in_files
from offbeat.trainers.saved_weights import SavedWeights, open_saved_weights, readers

_CONFIG: Final = "config.json"
_STATES: Final = "checkpoints/state_*"
_STUB: Final = "stub"


class UnfitWeights(FixableError):
    """A directory with weights that cannot start a run.

    Fix: set ``model.weights`` to weights of the same model.
    """

    form = "model.weights={} {}. {}"


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """A training checkpoint with weights that fit a model directory."""

    version: int
    backend: str
    model: str  # the checkpoint's description
    tensors: int


def found_weights(checkpoint: Path, model: Path) -> FoundWeights:
    """Describe a training checkpoint. Only its manifest and its tensors' names and shapes are read.

    Raises:
        UnfitWeights: The directory is not a training checkpoint, or belongs to a different model.
        CheckpointCorrupt, CheckpointMismatch: Its manifest cannot be read, or a file is missing.
        OSError: The disk cannot read.
    """
    manifest = _manifest(checkpoint)
    saved = _open_saved(checkpoint)
    wanted = _find_wanted(model)
    _compare(checkpoint, saved.shapes_like(wanted), wanted, model)
    about = manifest.identity
    return FoundWeights(manifest.version, about.backend, about.model, len(wanted))


def write_initial_model(checkpoint: Path, model: Path, target: Path) -> None:
    """Write a model directory: the checkpoint's weights, and all other files of ``model``. Atomic.

    The checkpoint's files are verified first. A few tensors are in memory at a time.

    Raises:
        UnfitWeights, CheckpointCorrupt, CheckpointMismatch: ``found_weights`` refuses the
            checkpoint, or a file has a different digest.
        OSError: The disk failed. ``target`` was not written.
    """
    found_weights(checkpoint, model)
    verify(checkpoint, _manifest(checkpoint).files)
    wanted = _find_wanted(model)
    saved = _open_saved(checkpoint)
    with replace_directory(target, model) as staged:
        named = saved.iterate_like(wanted)
        write_weights(((name_in_files(name, wanted), tensor) for name, tensor in named), staged)


def _manifest(checkpoint: Path) -> CheckpointManifest:
    if not (checkpoint / MANIFEST).is_file():
        problem, fix = _is_instead(checkpoint)
        raise UnfitWeights(str(checkpoint), problem, fix)
    manifest = read_manifest(checkpoint)
    if manifest.identity.backend == _STUB:
        fix = "Name a checkpoint of a run that trained a model"
        raise UnfitWeights(
            str(checkpoint), "is the state of a dry run, which holds no weights", fix
        )
    return manifest


def _is_instead(path: Path) -> tuple[str, str]:
    if states := sorted(path.glob(_STATES), key=lambda each: (len(each.name), each.name)):
        return "is a run, and no checkpoint of it", f"Name one: model.weights={states[-1]}"
    if (path / _CONFIG).is_file():
        return "is a model directory", f"Set model.path to it, and leave model.weights out: {path}"
    problem = f"holds no {MANIFEST}" if path.is_dir() else "is not a directory"
    return problem, "Name a checkpoint of a run, checkpoints/state_N"


def _open_saved(checkpoint: Path) -> SavedWeights:
    saved = open_saved_weights(checkpoint)
    if saved.has_adapters:
        fix = "Set model.path to the model that its run exported, checkpoints/step_N"
        raise UnfitWeights(str(checkpoint), "holds only adapters", fix)
    return saved


def _find_wanted(model: Path) -> Shapes:
    """Return the shapes in the model's files, without an output head that its config ties."""
    untied = readers(model).keys()
    return {name: shape for name, shape in file_shapes(model).items() if name in untied}


def _compare(checkpoint: Path, held: Shapes, wanted: Shapes, model: Path) -> None:
    """Refuse weights that differ from the model's files, naming the first difference."""
    stored = {name_in_files(name, wanted): shape for name, shape in held.items()}
    fix = f"Set model.path to the model that its run began with, not {model}"
    for name in sorted(wanted.keys() | stored.keys()):
        got, want = stored.get(name), wanted.get(name)
        if got == want:
            continue
        if got is None:
            problem = f"has no {name}, which the model has as {want}"
        elif want is None:
            problem = f"has {name}, which the model does not have"
        else:
            problem = f"has {name} as {got}, and the model as {want}"
        raise UnfitWeights(str(checkpoint), problem, fix)
