"""What the ranks of a world are asked to do with checkpoints. Runs in workers only."""

import errno
from pathlib import Path
from typing import Any

import torch
from parity_cases import Cut
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_jobs import make

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.disk import Disk
from offbeat.trainers.checkpoints.rank_store import RankCheckpoints
from offbeat.trainers.ranks.peers import PeerFailed, Peers
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.state import load_shards, save_shards


class RefusesToRename(Disk):
    """A disk on which everything can be written, and nothing can be given its name."""

    def rename(self, old: Path, new: Path) -> None:
        del old, new
        raise OSError(errno.EROFS, "Read-only file system")


def saved(
    peers: Peers, path: Path, cut: Cut, root: Path, version: int, fault: str = "", on: int = 0
) -> tuple[str, str]:
    """Save a state as of this version, with a fault on one rank: what was raised, and its text."""
    trainer = at_version(make(peers, path, cut), version)
    faulty = fault if peers.rank == on else ""

    def write(directory: Path) -> None:
        if faulty == "full":
            (directory / f"__{on}_0.distcp").symlink_to("/dev/full")
        elif faulty == "in the way":
            (directory / f"__{on}_0.distcp").mkdir()
        trainer.save_state(directory)

    store = store_of(trainer, peers, root, RefusesToRename() if faulty == "at the end" else None)
    try:
        store.save(version, trainer.weights_digest(), trainer.state_nbytes, write)
    except (CheckpointFailed, PeerFailed) as error:
        return type(error).__name__, str(error)
    return "", ""


def restored(
    peers: Peers, path: Path, cut: Cut, root: Path, at_most: int, lost: str = ""
) -> tuple[int, str, str]:
    """Version and digest after a restore; what was raised. ``lost``: a file that goes in its midst."""
    trainer = make(peers, path, cut)
    store = store_of(trainer, peers, root)
    found = store.rewind(at_most)
    if found is None:
        return 0, trainer.weights_digest(), ""
    if lost and not peers.rank:
        (found.directory / lost).unlink()
    peers.all_reduce_max([0])
    try:
        store.load(found, trainer.load_state)
    except (CheckpointFailed, PeerFailed) as error:
        return 0, "", type(error).__name__
    return trainer.steps_applied, trainer.weights_digest(), ""


def at_version(trainer: TorchTrainer, version: int) -> TorchTrainer:
    """As if it had got there: with weights that no other version has."""
    trainer.steps_applied = version
    with torch.no_grad():
        for each in trainer.module.parameters():
            each.add_(version)
    return trainer


def store_of(
    trainer: TorchTrainer, peers: Peers, root: Path, disk: Disk | None = None
) -> RankCheckpoints:
    return RankCheckpoints(root, trainer.identity, keep=2, peers=peers, disk=disk)


def uneven(peers: Peers, directory: Path) -> dict[str, Any]:
    """Save tensors of which some ranks hold no row at all; what is read back, whole."""
    mesh = init_device_mesh("cpu", (peers.size,))
    whole = {f"{rows} rows": torch.arange(3.0 * rows).reshape(rows, 3) for rows in (1, 2, 5)}

    def cut(values: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(values.clone(), mesh, [Shard(0)])

    save_shards({name: cut(each) for name, each in whole.items()}, directory, peers)
    again = {name: cut(torch.zeros_like(each)) for name, each in whole.items()}
    load_shards(again, directory, peers)
    return {name: each.full_tensor().tolist() for name, each in again.items()}  # pyright: ignore[reportAttributeAccessIssue]
