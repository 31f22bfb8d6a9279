"""Reads facts of a model directory: JSON files and the headers of safetensors files.

torch is not needed, unless a model's config has an unusual name for the maximum position. Then
transformers, which knows such names, is imported.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from offbeat.config.run import RunConfig
from offbeat.environments.tokenizer import TOKENIZER_FILES, find_tokenizer_files
from offbeat.messages.failures import OffbeatError
from offbeat.messages.finding import Finding, error, ok, size

_LONGEST_HEADER_BYTES: Final = 100 * 2**20  # the format's own bound
_LENGTH_BYTES: Final = 8
_OTHER_JSON: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_SUBJECT: Final = "model"
_POSITIONS: Final = "max_position_embeddings"
_INDEX: Final = "model.safetensors.index.json"
_FIX: Final = "Point model.path at a Hugging Face directory with config, weights (*.safetensors) and tokenizer."
_DOWNLOAD: Final = "One of the Hugging Face Hub is model.path=hf://OWNER/NAME."


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Facts about a model, read from its files."""

    parameters: int
    weight_bytes: int  # on disk
    max_positions: int | None  # None: not in its config
    model_type: str
    positions_key: str = "max_position_embeddings"  # config key of max_positions


def read_model(folder: Path) -> tuple[ModelFiles | None, list[Finding]]:
    """Read the model in ``folder``.

    Return the model's facts (None if it is unreadable), and the problems found.
    """
    if not folder.is_dir():
        return None, [error(_SUBJECT, f"{folder} is not a directory", f"{_FIX} {_DOWNLOAD}")]
    wrong = list(_missing_files(folder))
    settings, problem = _read_settings(folder / "config.json")
    wrong += [problem] if problem else []
    others = [folder / name for name in _OTHER_JSON if (folder / name).is_file()]
    wrong += [broken for other in others if (broken := _read_settings(other)[1])]
    parameters = nbytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            parameters += _parameters(file)
            nbytes += file.stat().st_size
        except (OSError, ValueError) as broken:
            fix = "Copy or download it again; a file that Git LFS has not fetched is a text of 3 lines."
            wrong.append(
                error(_SUBJECT, f"{file.name} is not a complete safetensors file: {broken}", fix)
            )
    if wrong:
        return None, wrong
    text = settings.get("text_config")
    inner = cast("dict[str, Any]", text) if isinstance(text, dict) else settings
    key, positions = _positions(inner)
    kind = str(settings.get("model_type", "unknown"))
    model = ModelFiles(parameters, nbytes, positions, kind, key)
    seen = f"{folder}: {model.model_type}, {parameters:,} parameters, {size(nbytes)}"
    return model, [ok(_SUBJECT, seen)]


def _positions(settings: dict[str, Any]) -> tuple[str, int | None]:
    """Return the config key of the maximum position and its value, or None if missing."""
    for key in _position_keys(settings):
        value = settings.get(key)
        if isinstance(value, int):
            return key, _with_rope_scaling(settings, value)
    return _POSITIONS, None


def _position_keys(settings: dict[str, Any]) -> Iterator[str]:
    """Yield candidate keys of the maximum position: standard, model-specific, similar ones."""
    yield _POSITIONS
    kind = settings.get("model_type")
    if _POSITIONS not in settings and isinstance(kind, str):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if kind in CONFIG_MAPPING:
            names: dict[str, str] = CONFIG_MAPPING[kind].attribute_map
            yield names.get(_POSITIONS, _POSITIONS)
    yield from (key for key in settings if "max" in key and ("seq" in key or "position" in key))


def _with_rope_scaling(settings: dict[str, Any], bound: int) -> int:
    """Return the maximum position after RoPE scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = settings.get(key)
        if isinstance(rope, dict):
            scaling = cast("dict[str, Any]", rope)
            kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
            first = scaling.get("original_max_position_embeddings", bound)
            if kind in ("dynamic", "yarn") and factor and first:
                return max(bound, int(first * factor))
    return bound


def _missing_files(folder: Path) -> Iterator[Finding]:
    if not any(folder.glob("*.safetensors")):
        yield error(_SUBJECT, f"{folder} has no *.safetensors file", _FIX)
    index, problem = _read_settings(folder / _INDEX) if (folder / _INDEX).is_file() else ({}, None)
    if problem:
        yield problem
    places: object = index.get("weight_map")
    if isinstance(places, dict):
        named = {str(file) for file in cast("dict[str, object]", places).values()}
        for name in sorted(name for name in named if not (folder / name).is_file()):
            seen = f"{folder} has no {name}, which its {_INDEX} names"
            yield error(_SUBJECT, seen, "Copy or download it again.")
    if not find_tokenizer_files(folder):
        yield error(_SUBJECT, f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)})", _FIX)


def _read_settings(path: Path) -> tuple[dict[str, Any], Finding | None]:
    try:
        settings: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, error(_SUBJECT, f"{path.parent} has no config.json", _FIX)
    except (OSError, ValueError) as broken:
        return {}, error(_SUBJECT, f"{path} cannot be read: {broken}", "Copy or download it again.")
    if not isinstance(settings, dict):
        return {}, error(_SUBJECT, f"{path} is not a JSON object", "Copy or download it again.")
    return cast("dict[str, Any]", settings), None


def _parameters(file: Path) -> int:
    """Return the number of elements of all tensors, from the header of a safetensors file.

    Raises:
        ValueError: The header is invalid, or the file ends before its last tensor.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= _LONGEST_HEADER_BYTES:
            raise ValueError(f"its header would be {length} bytes long")
        header: object = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")  # noqa: TRY004 - one error for any bad header
    tensors = cast("dict[str, dict[str, Any]]", header)
    tensors.pop("__metadata__", None)
    last = max((tensor.get("data_offsets", (0, 0))[1] for tensor in tensors.values()), default=0)
    whole, has = _LENGTH_BYTES + length + last, file.stat().st_size
    if has < whole:
        raise ValueError(f"it has {has} of {whole} bytes")
    return sum(math.prod(tensor.get("shape", ())) for tensor in tensors.values())


def check_lengths(config: RunConfig, model: ModelFiles) -> Iterator[Finding]:
    """Check that sequences are not longer than the model's maximum position."""
    length, has = config.generator.max_model_len, model.max_positions
    if has is None:
        yield ok("sequence length", f"generator.max_model_len={length}; the model names no bound")
    elif length > has:
        yield error(
            "sequence length",
            f"generator.max_model_len={length} is more than the model's {model.positions_key}={has}",
            f"Set generator.max_model_len to {has} or less.",
        )
    else:
        yield ok("sequence length", f"generator.max_model_len={length} of {has} positions")


_WEIGHTS_SUBJECT = "weights"


def check_weights(config: RunConfig) -> Iterator[Finding]:
    """If ``model.weights`` is set, report its content, or why a run cannot begin with it."""
    path = config.model.weights
    if path is None:
        return
    # Loads torch, which a recipe without such weights need not load here.
    from offbeat.trainers.warm_start import UnfitWeights, found_weights

    try:
        found = found_weights(Path(path), Path(config.model.path))
    except UnfitWeights as refused:
        yield error(_WEIGHTS_SUBJECT, f"model.weights={path} {refused.problem}", f"{refused.fix}.")
    except (OffbeatError, OSError) as refused:
        yield error(_WEIGHTS_SUBJECT, str(refused), "Name another checkpoint, checkpoints/state_N.")
    else:
        yield ok(
            _WEIGHTS_SUBJECT,
            f"{path}: version {found.version} of the {found.backend} trainer, {found.model}; its "
            f"{found.tensors} tensors are those of model.path. Its optimizer state is not read",
        )
