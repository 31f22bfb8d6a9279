"""Names of files on the Hugging Face Hub, as recipes write them."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

HUB: Final = "hf://"
FORM: Final = "hf://datasets/OWNER/NAME[@REVISION]/FILES"

READABLE: Final = (".parquet", ".jsonl", ".json", ".ndjson")
"""Endings of the files that can be read, Parquet or JSON Lines."""

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
    pattern: str  # a file, or with * several

    @property
    def is_readable(self) -> bool:
        """Return whether files of such a name may be Parquet or JSON Lines."""
        return self.pattern.endswith((*READABLE, "*"))


def is_on_hub(path: str | None) -> bool:
    """Return whether a path of a recipe names files on the hub, correctly or not."""
    return path is not None and path.startswith(HUB)


def hub_path(path: str) -> HubPath | None:
    """Return the parts of a path of ``FORM``; None for any other.

    A slash inside REVISION is written %2F, as in ``refs%2Fconvert%2Fparquet``.
    """
    found = _NAME.fullmatch(path)
    if found is None:
        return None
    dataset, revision, pattern = found.groups()
    return HubPath(dataset, unquote(revision) if revision else None, pattern)


def hub_model(text: str) -> tuple[str, str | None] | None:
    """Return name and revision of a text of ``MODEL_FORM``, which may begin with hf://; else None.

    A slash in the revision is written %2F.
    """
    found = _MODEL.fullmatch(text)
    if found is None:
        return None
    name, revision = found.groups()
    return name, unquote(revision) if revision else None


def name_of_copy(path: str) -> str | None:
    """Return ``hf://OWNER/NAME@COMMIT`` of a directory that holds a copy of that model, by its path.

    That is one of the cache of ``huggingface_hub``, or one that a run has downloaded; else None.
    """
    found = _COPY.fullmatch(path)
    if found is None:
        return None
    owner, name, commit = found.groups()
    return f"{HUB}{owner}/{name}@{commit}"
