"""Reads an offline run of W&B from its file, for the tests: records in the log format of LevelDB.

file     ":W&B", 3 bytes, then blocks of 32 KiB
block    records: CRC-32 u32, length u16, kind u8, bytes; fewer than 7 bytes at its end are padding
kind     1: a whole message; 2, 3, 4: its first, a middle, its last part
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_BLOCK, _HEAD, _FILE_HEAD = 32 * 1024, 7, 7
_FULL, _LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the values of each step that the run in this folder has logged."""
    messages: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="no extra wandb")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = list[dict[str, Any]]()
    for data in _messages(file.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return found


def _messages(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    at, parts = _FILE_HEAD, list[bytes]()
    while at + _HEAD <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + _HEAD : at + _HEAD + length])
        at += _HEAD + length
        if kind in {_FULL, _LAST}:
            yield b"".join(parts)
            parts.clear()
