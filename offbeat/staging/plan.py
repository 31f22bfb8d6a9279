"""Decides what a node has to copy, from the manifest and what is there. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from offbeat.staging.manifest import ManifestFile, ModelManifest, is_model_file

MARGIN_BYTES: Final = 2**30
"""Free space that staging leaves on a node's disk, for logs and temporary files."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The files that a node keeps and copies, in order."""

    kept: tuple[ManifestFile, ...]
    copied: tuple[ManifestFile, ...]

    @property
    def copied_bytes(self) -> int:
        return sum(file.nbytes for file in self.copied)

    def missing_bytes(self, free_bytes: int) -> int:
        """Return how many bytes the disk lacks; 0 if there is room.

        A damaged file occupies its space until the new copy replaces it.
        """
        if not self.copied:
            return 0
        return max(0, self.copied_bytes + MARGIN_BYTES - free_bytes)


def plan_copy(manifest: ModelManifest, sha256_by_name: Mapping[str, str]) -> CopyPlan:
    """Plan the copy to a directory whose files have these digests; equal ones are kept."""

    def is_there(file: ManifestFile) -> bool:
        return sha256_by_name.get(file.name) == file.sha256

    return CopyPlan(
        tuple(file for file in manifest.files if is_there(file)),
        tuple(file for file in manifest.files if not is_there(file)),
    )


def foreign_names(manifest: ModelManifest, names: Iterable[str]) -> list[str]:
    """Return the files of a directory that would mix with the model and are not of it."""
    of_model = {file.name for file in manifest.files}
    return sorted(name for name in names if is_model_file(name) and name not in of_model)
