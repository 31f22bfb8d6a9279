"""Parses names of files on the Hugging Face Hub, as recipes write them."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

HUB: Final = "hf://"
FORM: Final = "hf://datasets/OWNER/NAME[@REVISION]/FILES"

READABLE: Final = (".parquet", ".jsonl", ".json", ".ndjson")
"""Endings of readable files: Parquet or JSON Lines."""

MODEL_FORM: Final = "OWNER/NAME[@REVISION]"
_PART: Final = r"[A-Za-z0-9][\w.-]*"
_MODEL: Final = re.compile(rf"(?:hf://)?({_PART}/{_PART})(?:@([^@\s]+))?")
_COPY: Final = re.compile(rf".*/(?:models--)?({_PART})--({_PART})/(?:snapshots/)?([0-9a-f]{{40}})")
_NAME: Final = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")


@dataclass(frozen=True, slots=True)
class HubPath:
    """Files of one dataset, at a branch, tag or commit."""

    dataset: str  # OWNER/NAME
    revision: str | None  # None: the dataset's default branch
    pattern: str  # a file, or several with *

    @property
    def is_readable(self) -> bool:
        """Return whether files of this name may be Parquet or JSON Lines."""
        return self.pattern.endswith((*READABLE, "*"))


def is_on_hub(path: str | None) -> bool:
    """Return whether a recipe's path names files on the hub, even if it is malformed."""
    return path is not None and path.startswith(HUB)


def hub_path(path: str) -> HubPath | None:
    """Return the parts of a path of ``FORM``, or None for any other path.

    A slash inside REVISION is written %2F, as in ``refs%2Fconvert%2Fparquet``.
    """
    found = _NAME.fullmatch(path)
    if found is None:
        return None
    dataset, revision, pattern = found.groups()
    return HubPath(dataset, unquote(revision) if revision else None, pattern)


def hub_model(text: str) -> tuple[str, str | None] | None:
    """Return name and revision of a text of ``MODEL_FORM``, with or without hf://, or None.

    A slash in the revision is written %2F.
    """
    found = _MODEL.fullmatch(text)
    if found is None:
        return None
    name, revision = found.groups()
    return name, unquote(revision) if revision else None


def name_of_copy(path: str) -> str | None:
    """Return ``hf://OWNER/NAME@COMMIT`` for the path of a directory with a copy of the model.

    The copy is in the cache of ``huggingface_hub``, or a run downloaded it. Return None for any
    other directory.
    """
    found = _COPY.fullmatch(path)
    if found is None:
        return None
    owner, name, commit = found.groups()
    return f"{HUB}{owner}/{name}@{commit}"
