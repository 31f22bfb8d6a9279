"""The manifest of a checkpoint, and the checks of its files against it.

``manifest.json`` is an envelope: the bytes of the manifest, and their digest. So a flipped bit is
always detected, in a file or in the record of its digest.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from offbeat.messages.failures import OffbeatError
from offbeat.trainers.errors import CheckpointMismatch

MANIFEST: Final = "manifest.json"
SCHEMA: Final = 2
"""Version of the checkpoint format. Other versions are refused."""
_BLOCK_BYTES: Final = 4 * 2**20


class CheckpointCorrupt(OffbeatError):
    """A file of a checkpoint differs from the file that was written.

    Fix: none: an older checkpoint is restored.
    """

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file} differs from the file that was written: {self.problem}"


class Identity(msgspec.Struct, frozen=True):
    """Backend and model that a state belongs to. Only a trainer with an equal identity loads it."""

    backend: str
    model: str  # for messages
    fingerprint: str  # digest of names, shapes and dtypes of all weights


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    name: str
    nbytes: int
    digest: str  # xxh3-128


class CheckpointManifest(msgspec.Struct, frozen=True):
    """Content of a checkpoint: version, identity, and its files."""

    schema: int
    version: int
    weights_digest: str
    identity: Identity
    files: tuple[FileRecord, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files except the manifest."""
        return sum(each.nbytes for each in self.files)


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    manifest: msgspec.Raw


class _OnlySchema(msgspec.Struct, frozen=True):
    schema: int


Describe = Callable[[Path, Sequence[str]], Sequence[FileRecord]]
"""Function like ``describe``: it reads files in one process, or distributed over several."""


def describe(directory: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Read these files of a directory and return their sizes and digests.

    Raises:
        OSError: The disk cannot read.
    """
    files = [directory / name for name in names]
    return tuple(FileRecord(file.name, file.stat().st_size, _digest(file)) for file in files)


def encode(manifest: CheckpointManifest) -> bytes:
    """Encode the content of ``manifest.json``."""
    content = msgspec.json.encode(manifest)
    digest = xxhash.xxh3_128_hexdigest(content)
    return msgspec.json.encode(_Envelope(digest, msgspec.Raw(content)))


def read_manifest(directory: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint, and check that its files exist with their sizes.

    Raises:
        CheckpointCorrupt: The manifest or a file is missing or damaged.
        CheckpointMismatch: The manifest has a different schema.
        OSError: The disk cannot read.
    """
    file = directory / MANIFEST
    if not file.exists():
        raise CheckpointCorrupt(str(file), "it is missing")
    try:
        envelope = msgspec.json.decode(file.read_bytes(), type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointCorrupt(str(file), str(error)) from None
    content = bytes(envelope.manifest)
    _expect(file, xxhash.xxh3_128_hexdigest(content), envelope.digest)
    try:
        schema = msgspec.json.decode(content, type=_OnlySchema).schema
        if schema != SCHEMA:
            fix = "Resume with the release of offbeat that wrote it, or start a new run"
            raise CheckpointMismatch(str(directory), "schema", str(schema), str(SCHEMA), fix)
        manifest = msgspec.json.decode(content, type=CheckpointManifest)
    except msgspec.ValidationError as error:
        raise CheckpointCorrupt(str(file), str(error)) from None
    for each in manifest.files:
        if Path(each.name).name != each.name:
            raise CheckpointCorrupt(str(file), f"{each.name!r} is not a file of its directory")
        path = directory / each.name
        nbytes = path.stat().st_size if path.exists() else None
        if nbytes != each.nbytes:
            problem = "it is missing" if nbytes is None else f"{nbytes} bytes, not {each.nbytes}"
            raise CheckpointCorrupt(str(path), problem)
    return manifest


def verify(directory: Path, files: Sequence[FileRecord], describe: Describe = describe) -> None:
    """Read these files of a directory and compare their digests.

    Raises:
        CheckpointCorrupt: A digest differs. The error names the file and both digests.
        OSError: The disk cannot read.
    """
    got = {each.name: each.digest for each in describe(directory, [each.name for each in files])}
    for each in files:
        _expect(directory / each.name, got[each.name], each.digest)


def check_version(directory: Path, manifest: CheckpointManifest, named: int) -> None:
    """Refuse a checkpoint that is stored under the name of another version.

    Raises:
        CheckpointCorrupt: The versions differ. The error names the version that the checkpoint
            contains.
    """
    if manifest.version != named:
        raise CheckpointCorrupt(str(directory), f"it holds version {manifest.version}")


def check_identity(directory: Path, manifest: CheckpointManifest, own: Identity) -> None:
    """Refuse the state of a different backend or model.

    Raises:
        CheckpointMismatch: The identities differ. The error names the difference and the fix.
    """
    stored = manifest.identity
    if stored.backend != own.backend:
        fix = f"Set trainer.backend to {stored.backend}, or start a new run"
        if "stub" not in (stored.backend, own.backend):
            fix += f" with its weights: model.weights={directory}"
        raise CheckpointMismatch(str(directory), "backend", stored.backend, own.backend, fix)
    if stored.fingerprint != own.fingerprint:
        fix = (
            "Set model.path, model.dtype, trainer.lora and trainer.freeze as when the run "
            "began, or start a new run"
        )
        got, want = (f"{each.model} ({each.fingerprint[:8]})" for each in (stored, own))
        raise CheckpointMismatch(str(directory), "model", got, want, fix)


def _expect(file: Path, got: str, want: str) -> None:
    if got != want:
        raise CheckpointCorrupt(str(file), f"its xxh3-128 digest is {got}, not {want}")


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
