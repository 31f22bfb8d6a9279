"""States that say what they are, saved to a checkpoint store and read back."""

from pathlib import Path

import xxhash
from faulty_disk import FaultyDisk

from offbeat.run_files.disk import Disk
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.store import CheckpointStore, VerifiedCheckpoint

OWN = Identity("stub", "a stub", "f" * 32)


def state(version: int, lineage: int = 0) -> bytes:
    return f"state of version {version} in lineage {lineage} ".encode() * 20


def digest_of(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def store_on(root: Path, disk: Disk | None = None, own: Identity = OWN) -> CheckpointStore:
    return CheckpointStore(root, own, keep=2, disk=disk or FaultyDisk())


def save(root: Path, version: int, lineage: int = 0, disk: Disk | None = None) -> int:
    """Through a disk that may fail while the backend writes, too."""
    used, content = disk or FaultyDisk(), state(version, lineage)

    def write(directory: Path) -> None:
        used.write(directory / "counters.json", f'{{"version": {version}}}'.encode())
        used.write(directory / "weights", content)

    return store_on(root, used).save(version, digest_of(content), len(content), write)


def whole(stored: VerifiedCheckpoint | None) -> int:
    """The version of a checkpoint that holds what was saved; 0 for none."""
    if stored is None:
        return 0
    content = (stored.directory / "weights").read_bytes()
    assert digest_of(content) == stored.manifest.weights_digest
    assert content.startswith(f"state of version {stored.version} ".encode())
    return stored.version


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def latest_is_whole(root: Path) -> int:
    """The version LATEST names, 0 without one; that checkpoint verifies."""
    store = store_on(root)
    version = store.latest() or 0
    if version:
        assert whole(store.newest(version)) == version
    return version
