"""Reads a model directory: its manifest, and its files in chunks."""

import hashlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from offbeat.staging.manifest import (
    FOLDERS,
    INDEX,
    ManifestFile,
    ModelManifest,
    NothingToStage,
    check_shards,
    left_out_pickles,
    staged_names,
)
from offbeat.staging.progress import ProgressMeter

CHUNK_BYTES: Final = 8 * 2**20


class ModelSource(Protocol):
    """Port that a copy reads the files of a model through."""

    def chunks(self, file: ManifestFile) -> Iterator[bytes]:
        """Return the content of a file in order; ``OSError`` where it cannot be read."""
        ...


class DirectorySource:
    """``ModelSource`` of a directory that this machine sees."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, manifest: ModelManifest) -> bool:
        """Return whether all files are there with their sizes; digests are not computed."""
        try:
            return all(
                (self._directory / file.name).stat().st_size == file.nbytes
                for file in manifest.files
            )
        except OSError:
            return False

    def chunks(self, file: ManifestFile) -> Generator[bytes]:
        return file_chunks(self._directory / file.name)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_manifest(directory: Path, meter: ProgressMeter) -> ModelManifest:
    """Read every file of a model once, and return their sizes and digests.

    Raises:
        NothingToStage: The directory is no model, or cannot be read.
    """
    try:
        names = model_names(directory)
        return ModelManifest(tuple(_digested(directory, name, meter) for name in names))
    except OSError as error:
        raise _unreadable(directory, error) from error


def model_names(directory: Path) -> list[str]:
    """Return the names of the files to stage, without reading the weights.

    Raises:
        NothingToStage: The directory is no model, or cannot be listed.
    """
    try:
        names = staged_names(str(directory), _listed(directory))
        _check_index(directory, names)
    except OSError as error:
        raise _unreadable(directory, error) from error
    return names


def pickles_of(directory: Path) -> tuple[str, ...]:
    """Return the names of the files of a directory that are not staged because they are pickles."""
    return left_out_pickles(_listed(directory))


def file_chunks(path: Path) -> Generator[bytes]:
    """Yield the content of a file."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def digest_of(path: Path, doing: str, name: str, meter: ProgressMeter) -> tuple[int, str]:
    """Return size and SHA-256 of the content of a file."""
    meter.begin(doing, name, path.stat().st_size)
    nbytes, digest = 0, hashlib.sha256()
    for chunk in file_chunks(path):
        digest.update(chunk)
        nbytes += len(chunk)
        meter.advance(len(chunk))
    return nbytes, digest.hexdigest()


def _unreadable(directory: Path, error: OSError) -> NothingToStage:
    problem = f"it cannot be read ({error.strerror}: {error.filename})"
    return NothingToStage(str(directory), problem, "Name a model directory of this machine")


def _digested(directory: Path, name: str, meter: ProgressMeter) -> ManifestFile:
    return ManifestFile(name, *digest_of(directory / name, "reading", name, meter))


def _listed(directory: Path) -> Iterator[str]:
    for folder in (directory, *(directory / each for each in FOLDERS)):
        if folder == directory or folder.is_dir():
            for entry in folder.iterdir():
                if entry.is_file():
                    yield entry.relative_to(directory).as_posix()


def _check_index(directory: Path, names: list[str]) -> None:
    if INDEX not in names:
        return
    try:
        index = msgspec.json.decode((directory / INDEX).read_bytes(), type=_Index)
    except msgspec.MsgspecError as error:
        problem = f"{INDEX} is damaged ({error})"
        raise NothingToStage(str(directory), problem, "Bring it back from a copy") from error
    check_shards(str(directory), index.weight_map, names)
