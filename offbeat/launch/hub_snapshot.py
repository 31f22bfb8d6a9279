"""Lists a model of the Hugging Face Hub, downloads it to a local directory, and verifies the files.

Run as a module, this file downloads one snapshot and exits. ``launch.stage`` runs it as a child
process. It reads the files of a model as bytes, and neither loads nor runs any of them.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# huggingface_hub re-exports the errors of its HTTP client and leaves a few parameters untyped.

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from offbeat.environments.hub_files import HubFilesError, hub_errors
from offbeat.messages.failures import FixableError
from offbeat.messages.parent_death import die_with_parent

_LIST_S: Final = 60.0
_FOLDERS: Final = (".", "additional_chat_templates")  # other folders are not part of a model
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_OFFLINE_FIX: Final = (
    "run hf download OWNER/NAME --local-dir DIRECTORY elsewhere, copy it, and name that directory"
)


class CannotStage(FixableError):
    """A model cannot be staged, or a node does not have all of its files.

    Fix: follow the message. Other nodes keep the model.
    """


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """Files of a model at one commit of the hub."""

    model: str  # OWNER/NAME
    commit: str
    bytes_by_file: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())


def list_snapshot(model: str, revision: str | None) -> HubSnapshot:
    """List the files of a model to download: config, safetensors, tokenizer, chat templates.

    Raises:
        HubFilesError: The hub does not answer, or has no such model or revision.
        CannotStage: The model has no config, or no safetensors.
    """
    # Imported where it is used, here and below, because the import is slow.
    from huggingface_hub import HfApi  # noqa: PLC0415

    with hub_errors(model, f"model {model}", revision, _OFFLINE_FIX):
        info = HfApi().model_info(model, revision=revision, timeout=_LIST_S, files_metadata=True)
    names = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    wanted = {name: size for name, size in names.items() if is_wanted(name)}
    if "config.json" not in wanted:
        raise CannotStage(model, "it has no config.json", "Name a model that transformers can load")
    if not any(name.endswith(".safetensors") for name in wanted):
        problem = "its weights are not *.safetensors, and pickles run code when they are loaded"
        raise CannotStage(model, problem, "Convert the weights to safetensors first")
    return HubSnapshot(model, str(info.sha), wanted)


def is_wanted(name: str) -> bool:
    """Return whether a run may read a file: not hidden, not a pickle, in a known folder."""
    path = PurePosixPath(name)
    is_hidden = path.name.startswith(".")
    return str(path.parent) in _FOLDERS and not is_hidden and path.suffix not in _PICKLES


def verify(snapshot: HubSnapshot, target: Path) -> None:
    """Compare every file with its checksum on the hub. Remove a file that differs.

    Raises:
        HubFilesError: The hub does not answer.
        CannotStage: A file differs, or the directory has files of a different model.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415

    with hub_errors(snapshot.model, f"model {snapshot.model}", snapshot.commit, _OFFLINE_FIX):
        found = HfApi().verify_repo_checksums(
            snapshot.model, revision=snapshot.commit, local_dir=target
        )
    damaged = [each["path"] for each in found.mismatches if each["path"] in snapshot.bytes_by_file]
    for name in damaged:
        (target / name).unlink()
    if damaged:
        problem = f"{', '.join(damaged)} differed from the checksum of the hub and was removed"
        raise CannotStage(str(target), problem, "Stage again; if it repeats, check disk and memory")
    if foreign := [name for name in found.extra_paths if is_wanted(name)]:
        problem = f"it also holds files of another model: {', '.join(foreign)}"
        raise CannotStage(str(target), problem, "Remove them, or name an empty directory")


def main() -> None:
    """Download snapshot ``sys.argv[2]`` to ``sys.argv[3]``. On failure exit with 1 and one line."""
    die_with_parent(int(sys.argv[1]))
    snapshot = msgspec.json.decode(sys.argv[2], type=HubSnapshot)
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        with hub_errors(snapshot.model, f"model {snapshot.model}", snapshot.commit, _OFFLINE_FIX):
            snapshot_download(
                snapshot.model,
                revision=snapshot.commit,
                local_dir=sys.argv[3],
                allow_patterns=list(snapshot.bytes_by_file),
            )
    except HubFilesError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
