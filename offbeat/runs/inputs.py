"""The files a run is made of, by their content.

Kept beside its config, compared when it resumes.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import yaml

from offbeat.config.run import RunConfig
from offbeat.telemetry.summary import write_atomically

INPUTS: Final = "inputs.json"
DATA: Final = "data.path"
MODEL: Final = "model.path"

_DESCRIBES_MODEL: Final = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""The files of a model directory besides its weights: config, tokenizer, template, code."""


def input_digests(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the run's inputs by recipe key.

    Those that are no local files are left out.

    Of the model only what describes it is read, not its weights: those are the trainer's to verify.

    Raises:
        OSError: A file is there and cannot be read.
    """
    digests = dict[str, str]()
    data = config.data.path
    if data is not None and Path(data).is_file():
        digests[DATA] = _digest([Path(data)])
    model = Path(config.model.path)
    if model.is_dir():
        files = sorted({file for form in _DESCRIBES_MODEL for file in model.glob(form)})
        digests[MODEL] = _digest(file for file in files if not file.name.endswith(".index.json"))
    return digests


def write_inputs(config: RunConfig, directory: Path) -> None:
    """Write the digests of the run's inputs into its directory."""
    content = json.dumps(input_digests(config), indent=1, sort_keys=True)
    write_atomically(directory / INPUTS, f"{content}\n".encode())


def read_inputs(directory: Path) -> dict[str, str]:
    """Return the digests that a run was begun with; none for a run that has kept none."""
    path = directory / INPUTS
    return yaml.safe_load(path.read_bytes()) if path.exists() else {}


def _digest(files: Iterable[Path]) -> str:
    """Return one digest of the contents of the files, in this order."""
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()
