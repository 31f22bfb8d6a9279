"""Digests of a run's input files: recorded next to its config, compared when it resumes."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Final

from offbeat.config.by_value import unverifiable
from offbeat.config.graders import GRADERS
from offbeat.config.mixture import environment_views, key_in, prompt_paths
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.environments.hub_files import NO_COMMITS, fetch_commits
from offbeat.environments.inputs import ADVANTAGE, LOSS, SAMPLER, digest_contents, source_digest
from offbeat.environments.prompt_files import files_digest, prompt_files
from offbeat.generators.end_tokens import end_ids_of
from offbeat.run_files.limits import CONFIG_BYTES, TOKENIZER_BYTES, read_json
from offbeat.telemetry.summary import write_atomically

INPUTS: Final = "inputs.json"
TOKENIZER: Final = "tokenizer.json"
MODEL: Final = "model.path"
WORKING_DIR: Final = "working_dir"
"""Key of the directory that the run's modules were imported from. The value is not a digest."""

_DESCRIBES_MODEL: Final = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""Files of a model directory other than weights: config, tokenizer, template, code."""
_NOT_DESCRIBING: Final = (".index.json", "generation_config.json")


def input_digests(
    config: RunConfig, working_dir: Path, known: Mapping[str, str] = NO_COMMITS
) -> dict[str, str]:
    """Return the SHA-256 of the run's inputs by recipe key, without unreadable inputs.

    Also return the commit of each path on the hub: the one in ``known``, else the current commit.

    For the model, all files count except the weights, which the trainer verifies. Of the generation
    config, only the end tokens count, because the recipe sets the sampling. For code, the target's
    module and its imports from below ``working_dir`` count.

    Raises:
        HubFilesError: Files on the hub cannot be downloaded.
        OSError: A file exists and cannot be read.
    """
    digests = fetch_commits(config, known)
    for key, path in prompt_paths(config).items():
        files = prompt_files(path, digests)
        if all(file.is_file() for file in files):
            digests[key] = files_digest(files)
    model = Path(config.model.path)
    if model.is_dir():
        files = sorted({file for form in _DESCRIBES_MODEL for file in model.glob(form)})
        described = [file for file in files if not file.name.endswith(_NOT_DESCRIBING)]
        contents = (file.read_bytes() for file in described)
        digests[MODEL] = digest_contents(chain(contents, [_end_ids(model)]))
    for key, target in targets(config).items():
        if digest := source_digest(target, working_dir):
            digests[key] = digest
        if not_covered := unverifiable(target):
            digests[f"{key}, not verified"] = ", ".join(not_covered)
    return digests


def _end_ids(model: Path) -> bytes:
    try:
        return repr(end_ids_of(model)).encode()
    except ValueError:  # not JSON: loading the model reports it
        return b"unknown"


def targets(config: RunConfig) -> dict[str, str]:
    """Return the ``module:name`` of the user's code in this recipe, by key, without graders."""
    named = {
        key_in(name, key): target
        for name, view in environment_views(config).items()
        for key, target in view.environment.targets.items()
    }
    if isinstance(config.sampler, CustomSamplerConfig):
        named[SAMPLER] = config.sampler.target
    if (advantage := config.algorithm.advantage_target) is not None:
        named[ADVANTAGE] = advantage
    if isinstance(config.algorithm.loss, CustomLossConfig):
        named[LOSS] = config.algorithm.loss.target
    return {key: target for key, target in named.items() if target not in GRADERS}


def find_shipped_code(run_dir: Path, working_dir: Path, config: RunConfig) -> str:
    """Return why the recipe's code may come from the run directory itself, or "" if it does not.

    Whoever wrote the directory chose its recipe, and could in this way run code on the reader's
    machine.
    """
    named = targets(config)
    if not named:
        return ""
    if not working_dir.is_absolute():
        return f"{INPUTS} names {str(working_dir)!r} as working directory, which is not absolute"
    run = run_dir.resolve()
    if working_dir.resolve().is_relative_to(run):
        return f"its code is imported from {working_dir}, inside the run directory"
    for key, target in named.items():
        module = working_dir / target.partition(":")[0].replace(".", "/")
        if module.resolve().is_relative_to(run):
            return f"{key}={target} is inside the run directory"
    return ""


def all_inputs(config: RunConfig, working_dir: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the run's inputs, and the directory that its modules come from.

    ``before`` provides the digests of inputs that cannot be read now, and the commits of paths on
    the hub.
    """
    inputs = {**before, **input_digests(config, working_dir, before)}
    return inputs | {WORKING_DIR: str(working_dir)}


def keep_tokenizer(model: Path, directory: Path) -> None:
    """Copy the model's tokenizer, if it has one, into the run's directory.

    Logged samples are token ids. Without this copy of the tokenizer, they would be unreadable once
    the model is gone.
    """
    tokenizer = model / TOKENIZER
    if tokenizer.is_file() and tokenizer.stat().st_size <= TOKENIZER_BYTES:
        write_atomically(directory / TOKENIZER, tokenizer.read_bytes())


def record_input(directory: Path, key: str, digest: str) -> None:
    """Record the digest of an input that the driver could not read but another process has read."""
    inputs = read_inputs(directory)
    if key not in inputs:
        replace_inputs(directory, inputs | {key: digest})


def read_inputs(directory: Path) -> dict[str, str]:
    """Return the digests that a run began with, or none if the run recorded none.

    Raises the errors of ``read_json``, except for a missing file.
    """
    path = directory / INPUTS
    return read_json(path, CONFIG_BYTES, dict[str, str]) if path.exists() else {}


def replace_inputs(directory: Path, inputs: Mapping[str, str]) -> None:
    """Replace the inputs of a run in its directory."""
    content = json.dumps(dict(inputs), indent=1, sort_keys=True)
    write_atomically(directory / INPUTS, f"{content}\n".encode())
