"""Finds in a model's files the tokens that end a sample, for every kind of engine.

Only JSON files are read. If samples never ended, the model would train only on truncated samples.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import structlog

_NAMED_IN: Final = ("generation_config.json", "config.json")
_log = structlog.stdlib.get_logger()


def end_ids_of(model_path: str | Path) -> list[int]:
    """Return the end-of-sequence tokens of a model directory, from the first file that has any.

    Raises:
        ValueError: A file is not a JSON object.
    """
    for name in _NAMED_IN:
        settings = _read(Path(model_path) / name)
        for inner in (settings, settings.get("text_config")):
            ended: Any = cast("dict[str, Any]", inner).get("eos_token_id") if inner else None
            if ended is not None:
                return [ended] if isinstance(ended, int) else [int(each) for each in ended]
    return []


STOP_IDS_FIX: Final = "Use ids of the model's tokenizer"


def end_ids_problem(
    model_path: str | Path, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> str:
    """Return the reason why samples may never end, or an empty string.

    Args:
        model_path: Directory of the model.
        stop_token_ids: Additional tokens that end a sample, from the recipe.
        stop: Strings that end a sample, from the recipe.
    """
    folder = Path(model_path)
    ends = [*end_ids_of(folder), *stop_token_ids]
    token, id_ = tokenizer_end(folder)
    if not ends and stop:
        return ""
    if not ends:
        last = f"; its tokenizer ends with {token!r} ({id_})" if id_ is not None else ""
        return f"{' and '.join(_NAMED_IN)} name no eos_token_id{last}: every sample is cut off"
    if id_ is not None and id_ not in ends:
        return (
            f"the tokenizer's end token is {token!r} ({id_}), but samples end only with {ends}: "
            "a model that was trained to end with the tokenizer's token is cut off"
        )
    return ""


def stop_ids_problem(stop_token_ids: Sequence[int], vocabulary: int) -> str:
    """Describe ids that are outside a vocabulary of this size, or return an empty string."""
    outside = [each for each in stop_token_ids if not 0 <= each < vocabulary]
    return f"stop_token_ids={outside} are outside the vocabulary of {vocabulary}" if outside else ""


def warn_of_end_ids(
    model_path: str | Path, stop_token_ids: Sequence[int], stop: Sequence[str]
) -> None:
    """Log a warning if ``end_ids_problem`` finds a problem."""
    if problem := end_ids_problem(model_path, stop_token_ids, stop):
        _log.warning("model.no_end", problem=problem, fix="generator.sampling.stop_token_ids")


def tokenizer_end(folder: Path) -> tuple[str, int | None]:
    """Return the tokenizer's own end-of-sequence token and its id, each None if unknown."""
    settings = _read(folder / "tokenizer_config.json")
    token: Any = settings.get("eos_token")
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    if not isinstance(token, str):
        return "", None
    known = (id_ for content, id_ in _special_tokens(folder, settings) if content == token)
    return token, next(known, None)


def _special_tokens(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    added: dict[str, dict[str, Any]] = settings.get("added_tokens_decoder") or {}
    for id_, each in added.items():
        yield str(each.get("content")), int(id_)
    tokenizer = _read(folder / "tokenizer.json")
    for each in tokenizer.get("added_tokens") or ():
        yield str(each["content"]), int(each["id"])
    vocabulary: Any = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict):
        yield from cast("dict[str, int]", vocabulary).items()


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content: object = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")  # noqa: TRY004 - one error for any bad file
    return cast("dict[str, Any]", content)
