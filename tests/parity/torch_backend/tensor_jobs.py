"""What tensor-parallel ranks are asked to do. Runs in workers only."""

from pathlib import Path

from parity_cases import TOKENS, Cut, Step
from torch_jobs import feed, make, nbytes

from offbeat.messages.fences import StepKey
from offbeat.trainers.rank_bytes import RankBytes
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.sharding import own
from offbeat.weight_sync.reshard.region import Region


def held(
    peers: Peers, path: Path, cut: Cut, step: Step
) -> tuple[dict[str, Region], dict[str, tuple[int, ...]], RankBytes]:
    """This rank's regions of the weights, the shapes of what is there, and its bytes after a step."""
    trainer = make(peers, path, cut)
    key = feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    gradients = nbytes(each.grad for each in trainer.module.parameters() if each.grad is not None)
    trainer.finish_train_step(key)
    weights = nbytes([*trainer.module.parameters(), *trainer.module.buffers()])
    moments = nbytes(trainer._optimizer.moments().values())  # noqa: SLF001 -- no public total
    regions = trainer.held_regions()
    return (
        {each.name: each.region for each in regions},
        {each.name: tuple(each.values.shape) for each in regions},
        RankBytes(weights, gradients, moments),
    )


def rounded_otherwise(peers: Peers, path: Path, cut: Cut, step: Step) -> tuple[float, str]:
    """Norm and digest of a step in which each rank rounds gradients of the norms in its own way."""
    trainer = make(peers, path, cut)
    key = feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    for each in trainer.module.parameters():
        if each.ndim == 1:
            own(each.grad).mul_(1 + 1e-12 * peers.rank)
    result = trainer.finish_train_step(key)
    return result.grad_norm, trainer.weights_digest()
