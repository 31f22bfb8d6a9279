"""Actors that stage a model: one per node that copies, one beside the driver that is read from."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, TypeAlias

import ray
from ray.exceptions import RayError, RayTaskError

from offbeat.actors.call import cause_of, lost
from offbeat.actors.handles import Handle
from offbeat.messages.text import first_line
from offbeat.run_files.disk import DISK
from offbeat.staging.copying import copy_model
from offbeat.staging.manifest import ManifestFile, ModelManifest
from offbeat.staging.outcome import NodeOutcome
from offbeat.staging.progress import ProgressMeter, StagingProgress
from offbeat.staging.source import CHUNK_BYTES, DirectorySource

_READ_S: Final = 120.0
Reference: TypeAlias = "ray.ObjectRef[Any]"


class ModelReaderActor:
    """Reads the files of a manifest for nodes that do not see the model directory."""

    def __init__(self, directory: Path, manifest: ModelManifest) -> None:
        self._directory = directory
        self._names = {file.name for file in manifest.files}

    def read(self, name: str, offset: int) -> bytes:
        """Return at most ``CHUNK_BYTES`` of a file; ``FileNotFoundError`` for any other name."""
        if name not in self._names:
            raise FileNotFoundError(name)
        handle = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(handle, CHUNK_BYTES, offset)
        finally:
            os.close(handle)


class StagingActor:
    """Copies a model to the disk of its node; ``progress`` is answered meanwhile."""

    def __init__(self) -> None:
        self._meter = ProgressMeter()

    def copy(
        self, manifest: ModelManifest, directory: Path, reader: Handle, target: Path
    ) -> NodeOutcome:
        """Copy from ``directory`` where this node sees the model there, else through ``reader``."""
        seen = DirectorySource(directory)
        source = seen if seen.has(manifest) else RemoteSource(reader)
        return copy_model(manifest, source, target, self._meter, DISK)

    def progress(self) -> StagingProgress:
        return self._meter.now


class RemoteSource:
    """``ModelSource`` of a directory that only the driver's node sees."""

    def __init__(self, reader: Handle) -> None:
        self._reader = reader

    def chunks(self, file: ManifestFile) -> Generator[bytes]:
        offset = 0
        while offset < file.nbytes:
            try:
                asked: Reference = self._reader.read.remote(file.name, offset)
                chunk = ray.get(asked, timeout=_READ_S)
            except RayError as error:
                problem = f"{file.name} cannot be read from the driver's node: {first_line(error)}"
                raise OSError(problem) from error
            if not chunk:
                return
            offset += len(chunk)
            yield chunk


class RayStagingJob:
    """``WatchedJob`` of one node's ``StagingActor``."""

    def __init__(self, node: str, actor: Handle, result: Reference) -> None:
        self._node, self._actor, self._result = node, actor, result
        self._asked: Reference = actor.progress.remote()
        self._progress = StagingProgress()

    def result(self) -> NodeOutcome | None:
        if not _is_ready(self._result):
            return None
        try:
            return ray.get(self._result)
        except RayTaskError as error:
            raise cause_of(error, self._node, "staging") from None
        except RayError as error:
            raise lost(error, self._node, "staging") from None

    def progress(self) -> StagingProgress:
        if _is_ready(self._asked):
            asked: Reference = self._asked
            self._asked = self._actor.progress.remote()
            with contextlib.suppress(RayError):  # ``result`` says how the process was lost
                self._progress = ray.get(asked)
        return self._progress

    def abandon(self) -> None:
        ray.kill(self._actor)


def _is_ready(ref: Reference) -> bool:
    ready, _ = ray.wait([ref], timeout=0)
    return ref in ready
