"""Snapshots of a queue on disk: the index, the payloads, and a manifest with their digests.

manifest.json        format, and for each payload its file, place, bytes and digest
index.msgpack        the core's snapshot; payloads by number
payloads-0000.bin    packed payloads (``codec.pack``) one behind another
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import xxhash

from offbeat.queue_service.core.core import QueueCore
from offbeat.queue_service.core.records import PutReceipt
from offbeat.queue_service.core.snapshot import QueueSnapshot
from offbeat.queue_service.errors import SnapshotFailed
from offbeat.queue_service.server.payload_memory import PayloadMemory
from offbeat.queue_service.storage.arenas import Bytes
from offbeat.queue_service.storage.blocks import columns_in, described
from offbeat.queue_service.wire import WirePayload
from offbeat.run_files.disk import DISK
from offbeat.transfer_queue import codec

FORMAT: Final = 1
SEGMENT_BYTES: Final = 256 << 20
_INDEX: Final = "index.msgpack"
_MANIFEST: Final = "manifest.json"
_NO_PAYLOAD: Final = WirePayload(b"", 0, b"")


class SavedPayload(msgspec.Struct, frozen=True, array_like=True):
    """Location and digest of one payload in a file."""

    file: str
    start: int
    nbytes: int
    digest: str


class SnapshotBody(msgspec.Struct, frozen=True):
    """Content of a snapshot's manifest."""

    format: int
    index_digest: str
    payloads: list[SavedPayload]


class SnapshotManifest(msgspec.Struct, frozen=True):
    """The body of a manifest, and the digest of its JSON."""

    digest: str
    body: SnapshotBody


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of the bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


class Saving:
    """Writes snapshots one at a time, off the event loop, and restores one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def write(
        self, directory: str, index: QueueSnapshot, payloads: Sequence[tuple[WirePayload, Bytes]]
    ) -> None:
        """Write a snapshot; the memory of its payloads must not change meanwhile.

        Raises:
            SnapshotFailed: It could not be written; an existing snapshot is unchanged.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            encoded = msgspec.msgpack.encode(index)
            await loop.run_in_executor(None, write, Path(directory), encoded, payloads)

    async def restore(self, directory: str, core: QueueCore, memory: PayloadMemory) -> int:
        """Restore a snapshot into a new core; return its newest generation.

        Groups whose payloads fail verification are reported lost; the others are restored.

        Raises:
            SnapshotFailed: There is no snapshot, or its index fails verification.
        """
        loop = asyncio.get_running_loop()
        index, body, home = await loop.run_in_executor(None, read_index, Path(directory))
        kept, broken = list[WirePayload](), dict[int, str]()
        for number, entry in enumerate(body.payloads):
            try:
                kept.append(memory.stored(await loop.run_in_executor(None, read, home, entry)))
            except (OSError, ValueError, codec.CorruptPayload) as error:
                kept.append(_NO_PAYLOAD)
                broken[number] = f"not restored: {error}"
        core.import_(index, kept, loop.time())
        for receipt, reason in _groups_of(index, broken):
            core.lost((receipt,), reason)
        return index.generation


def _groups_of(index: QueueSnapshot, broken: dict[int, str]) -> list[tuple[PutReceipt, str]]:
    return [
        (group.receipt, broken[part.payload])
        for partition in index.partitions
        for group in partition.groups
        for part in group.parts
        if part.payload in broken
    ]


# --- files; none of this runs on the loop --------------------------------------------------------


def write(directory: Path, index: bytes, payloads: Sequence[tuple[WirePayload, Bytes]]) -> None:
    """Write a snapshot beside ``directory``, make it durable, then rename it into place.

    Raises:
        SnapshotFailed: The directory is occupied, or the disk refused a write.
    """
    aside = directory.with_name(f"{directory.name}.writing")
    try:
        if directory.exists() and not (directory / _MANIFEST).exists() and any(directory.iterdir()):
            raise SnapshotFailed(str(directory), "holds other files; name an empty or a new place")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        entries = _write_payloads(aside, payloads)
        body = SnapshotBody(FORMAT, digest_of(index), entries)
        manifest = SnapshotManifest(digest_of(msgspec.json.encode(body)), body)
        _write_file(aside / _INDEX, index)
        _write_file(aside / _MANIFEST, msgspec.json.encode(manifest))
        DISK.sync(aside)
        _replace(directory, aside)
    except OSError as error:
        raise SnapshotFailed(str(directory), str(error)) from None


def _replace(directory: Path, aside: Path) -> None:
    old = _old(directory)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    aside.rename(directory)
    DISK.sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _old(directory: Path) -> Path:
    """Return the path of the former snapshot while it is being replaced."""
    return directory.with_name(f"{directory.name}.old")


def _write_payloads(
    aside: Path, payloads: Sequence[tuple[WirePayload, Bytes]]
) -> list[SavedPayload]:
    entries: list[SavedPayload] = []
    files = 0
    file: BinaryIO | None = None
    try:
        for payload, block in payloads:
            packed = codec.pack(columns_in(payload.header, block))
            if file is None or file.tell() + packed.nbytes > SEGMENT_BYTES:
                if file is not None:
                    _finish(file)
                file = (aside / f"payloads-{files:04d}.bin").open("wb")
                files += 1
            name = Path(file.name).name
            entries.append(SavedPayload(name, file.tell(), packed.nbytes, digest_of(packed.data)))
            file.write(packed.data)
        if file is not None:
            _finish(file)
    finally:
        if file is not None:
            file.close()
    return entries


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _finish(file)


def read_index(directory: Path) -> tuple[QueueSnapshot, SnapshotBody, Path]:
    """Return the index of a snapshot, its manifest, and the directory of its files.

    Raises:
        SnapshotFailed: There is no snapshot, or it fails verification.
    """
    home = directory if directory.exists() else _old(directory)
    try:
        manifest = msgspec.json.decode((home / _MANIFEST).read_bytes(), type=SnapshotManifest)
        index = (home / _INDEX).read_bytes()
        body = manifest.body
        if body.format != FORMAT:
            raise SnapshotFailed(str(home), f"format {body.format}; this code reads {FORMAT}")
        if manifest.digest != digest_of(msgspec.json.encode(body)):
            raise SnapshotFailed(str(home), f"{_MANIFEST} is damaged")
        if body.index_digest != digest_of(index):
            raise SnapshotFailed(str(home), f"{_INDEX} is damaged")
        return msgspec.msgpack.decode(index, type=QueueSnapshot), body, home
    except (OSError, msgspec.MsgspecError) as error:
        raise SnapshotFailed(str(directory), str(error)) from None


def read(home: Path, entry: SavedPayload) -> WirePayload:
    """Read and verify one payload; return it as a message would carry it.

    Raises:
        OSError: The file cannot be read.
        ValueError: Its content is not what was written.
    """
    with (home / entry.file).open("rb") as file:
        file.seek(entry.start)
        packed = file.read(entry.nbytes)
    if digest_of(packed) != entry.digest:
        raise ValueError(f"{entry.file} is damaged at byte {entry.start}")
    block = described(codec.unpack(packed, verify=False))
    memory = np.empty(block.shape.nbytes, np.uint8)
    block.write(memory)
    return WirePayload(block.shape.header, block.shape.nbytes, memory.tobytes())
