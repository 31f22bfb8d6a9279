"""Downloads the models of the Hugging Face Hub that a recipe names, once, to the local disk.

Every part of a run reads models from directories. So the directory replaces the name in the recipe
before anything else reads it. The run records the directory and the commit, so a resume reads the
same weights.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from offbeat.config.hub_path import HUB, MODEL_FORM, hub_model, is_on_hub
from offbeat.config.run import RunConfig
from offbeat.environments.hub_files import HubFilesError, HubUnreachable
from offbeat.launch.hub_snapshot import HubSnapshot, list_snapshot
from offbeat.launch.stage import stage_model

STALL_S: Final = 120.0
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REFS: Final = "refs"
_CONFIG: Final = "config.json"


def with_local_model(config: RunConfig, say: Callable[[str], object]) -> RunConfig:
    """Return the recipe. If ``model.path`` names a model on the hub, replace it by a directory.

    The model is downloaded unless this machine has it. ``say`` receives progress lines.

    Raises:
        HubFilesError: The hub has no such model, or cannot be reached.
        CannotStage: The model has no safetensors, or its download fails or stalls.
        DeadlineExceeded: The disk or the hub is too slow for the comparison with the checksums.
    """
    if not is_on_hub(config.model.path):
        return config
    path = str(find_or_download(config.model.path, say))
    model = config.model.model_copy(update={"path": path})
    return config.model_copy(update={"model": model})


def find_or_download(path: str, say: Callable[[str], object]) -> Path:
    """Return the directory of a model ``hf://OWNER/NAME[@REVISION]``.

    Raises the same errors as ``with_local_model``. Without a network, this is the directory that
    the revision named last.
    """
    named = hub_model(path)
    if named is None:
        raise HubFilesError(f"model.path={path}", "names no model", f"Write {HUB}{MODEL_FORM}")
    name, revision = named
    if revision and _COMMIT.fullmatch(revision) and (there := _find_download(name, revision)):
        return there
    try:
        snapshot = list_snapshot(name, revision)
    except HubUnreachable as error:
        if (there := _last(name, revision)) is None:
            raise _as_path_too(error, name) from error
        say(f"model {name}: the hub cannot be reached. The copy of commit {there.name} is used")
        return there
    except HubFilesError as error:
        raise _as_path_too(error, name) from error
    there = (
        _find_cached(snapshot) or _find_download(name, snapshot.commit) or _download(snapshot, say)
    )
    ref = _ref(name, revision)
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(str(there), encoding="utf-8")
    return there


def _as_path_too(error: HubFilesError, name: str) -> HubFilesError:
    """Return the error for a name that the user may have meant to be a directory."""
    problem = f"no directory has that name, and as a model of the hub: {error.problem}"
    return type(error)(f"model.path={name}", problem, error.fix)


def _download(snapshot: HubSnapshot, say: Callable[[str], object]) -> Path:
    """Download and verify a model. Its directory gets its final name when it is complete."""
    target = _folder(snapshot.model) / snapshot.commit
    beside = target.with_name(f"{snapshot.commit}.part")
    files = len(snapshot.bytes_by_file)
    say(f"model {snapshot.model}: {files} files, {snapshot.nbytes:,} bytes to {target}")
    for line in stage_model(snapshot, beside, STALL_S):
        say(f"model {snapshot.model}: {line}")
    beside.rename(target)
    return target


def _find_download(name: str, commit: str) -> Path | None:
    target = _folder(name) / commit
    return target if target.is_dir() else None


def _find_cached(snapshot: HubSnapshot) -> Path | None:
    """Return the directory in the cache of ``huggingface_hub``, if it has every file of a model."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 -- slow to import

    name, commit = snapshot.model, snapshot.commit
    for file, nbytes in snapshot.bytes_by_file.items():
        path = try_to_load_from_cache(name, file, revision=commit)
        if not isinstance(path, str) or Path(path).stat().st_size != nbytes:
            return None
    return _get_folder(try_to_load_from_cache(name, _CONFIG, revision=commit))


def _last(name: str, revision: str | None) -> Path | None:
    """Return the directory that the revision last named on the hub, if it exists here."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    ref = _ref(name, revision)
    if ref.is_file() and (there := Path(ref.read_text(encoding="utf-8"))).is_dir():
        return there
    return _get_folder(try_to_load_from_cache(name, _CONFIG, revision=revision))


def _get_folder(file: object) -> Path | None:
    return Path(file).parent if isinstance(file, str) else None


def _home() -> Path:
    from huggingface_hub.constants import HF_HOME  # noqa: PLC0415

    return Path(HF_HOME) / "offbeat"


def _folder(name: str) -> Path:
    return _home() / name.replace("/", "--")


def _ref(name: str, revision: str | None) -> Path:
    return _folder(name) / _REFS / quote(revision or "main", safe="")
