"""What ranks exchange while they train and write checkpoints, watched from inside. In workers only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from checkpoint_jobs import store_of
from parity_cases import TOKENS, Cut, Step
from torch_jobs import feed, make

from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers

PICKLING = {"_object_to_tensor", "_tensor_to_object"}
"""What every object collective of torch goes through, on each side."""


@contextmanager
def pickles_exchanged() -> Iterator[list[str]]:
    """Who has called for a pickle to be sent or taken, in the order of the calls."""
    callers = list[str]()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name in PICKLING and frame.f_back is not None:
            callers.append(frame.f_back.f_code.co_name)

    sys.setprofile(watch)
    try:
        yield callers
    finally:
        sys.setprofile(None)


def trained_and_saved(peers: Peers, path: Path, step: Step, root: Path) -> tuple[list[str], int]:
    """The pickles exchanged from load to restore, and the version that was restored."""
    with pickles_exchanged() as pickles:
        trainer = make(peers, path, Cut(dtype="float32"))
        trainer.finish_train_step(feed(trainer, step, TOKENS, 2, StepKey(1, 1, 0)))
        store = store_of(trainer, peers, root)
        store.save(1, trainer.weights_digest(), trainer.state_nbytes, trainer.save_state)
        found = store.rewind(1)
        assert found is not None
        store.load(found, trainer.load_state)
    return pickles, trainer.steps_applied


def object_collective(peers: Peers) -> list[str]:
    """What the watch sees of one of torch's own."""
    import torch.distributed as dist  # noqa: PLC0415 -- the others need it not

    values: list[Any] = [None] * peers.size
    with pickles_exchanged() as pickles:
        dist.all_gather_object(values, peers.rank)
    return pickles


def groups_made_later(peers: Peers) -> list[int]:
    """The sum of ranks in a group that is made long after the world has met."""
    import gc  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415 -- the others need it not

    gc.collect()
    group, total = dist.new_group(list(range(peers.size))), torch.tensor([peers.rank])
    dist.all_reduce(total, group=group)
    return total.tolist()
