"""The files of a model or a training checkpoint that are staged, each with its size and digest."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from offbeat.messages.failures import OffbeatError

CONFIG: Final = "config.json"
CHECKPOINT: Final = "manifest.json"
"""File that a training checkpoint, ``checkpoints/state_N``, has instead of a config."""
INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = ".safetensors"
FOLDERS: Final = ("additional_chat_templates",)
"""The folders of a model directory whose files a tokenizer reads; others are not part of the model."""

_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SHOWN: Final = 3


class NothingToStage(OffbeatError):
    """A model cannot be staged; no node was touched."""

    source: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}. {self.fix}"


class SourceStalled(NothingToStage):
    """Reading or download on this machine that stands still; its threads may never end."""


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of a model, as it was read at the source."""

    name: str  # relative to the model directory, with /
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The files of a model. Equal files are the same model."""

    files: tuple[ManifestFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def staged_names(source: str, names: Iterable[str]) -> list[str]:
    """Return the names of the files to stage among those of a directory, ``config.json`` last.

    Hidden files, pickles and files of other folders are left out. The config, of a training
    checkpoint its manifest, comes last so that a directory whose first copy was interrupted is not
    yet a model to anybody.

    Raises:
        NothingToStage: There is no config and no manifest, or no safetensors file.
    """
    every = sorted(names)
    staged = [name for name in every if is_model_file(name) and not _is_pickle(name)]
    last = CONFIG if CONFIG in staged or CHECKPOINT not in staged else CHECKPOINT
    if last not in staged:
        raise NothingToStage(source, f"it has no {CONFIG}", "Name a Hugging Face model directory")
    if not any(name.endswith(WEIGHTS) for name in staged):
        pickles = [name for name in every if _is_pickle(name)]
        problem = (
            f"its weights are pickles ({shortened(pickles)}), which run code when they are loaded"
            if pickles
            else f"it has no *{WEIGHTS}"
        )
        raise NothingToStage(source, problem, f"Convert the weights to {WEIGHTS} first")
    return sorted(staged, key=lambda name: (name == last, name))


def left_out_pickles(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the files of a model that are not staged because they are pickles."""
    return tuple(sorted(name for name in names if is_model_file(name) and _is_pickle(name)))


def check_shards(source: str, shard_by_tensor: Mapping[str, str], names: Iterable[str]) -> None:
    """Check that each file that the index of the weights names is there.

    Raises:
        NothingToStage: One is missing.
    """
    missing = sorted(set(shard_by_tensor.values()) - set(names))
    if missing:
        problem = f"{INDEX} names files that are not there: {shortened(missing)}"
        raise NothingToStage(source, problem, "Complete the model directory first")


def is_model_file(name: str) -> bool:
    """Return whether a name is that of a file of a model, by where it is."""
    path = PurePosixPath(name)
    return not path.name.startswith(".") and str(path.parent) in {".", *FOLDERS}


def shortened(names: Sequence[str]) -> str:
    """Format the first few names, and how many there are more."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _is_pickle(name: str) -> bool:
    return name.endswith(_PICKLES)
