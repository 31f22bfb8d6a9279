"""What the ranks of a grid beside megatron-core hold and send. Runs in workers only."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_bugs import main_grads
from megatron_cases import JobStep
from megatron_grid_jobs import dealt, feed, make, with_library
from parity_cases import MegatronCut as Cut
from reshard_jobs import resharded
from torch import Tensor

from offbeat.messages.fences import StepKey
from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer
from offbeat.plugins.megatron.optimizer import MOMENTS
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.model import load_model
from offbeat.trainers.torch.sharding import own
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.transfer_queue.schema import REFERENCE_LOGPROBS
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync.chunks import iterate_weights
from offbeat.weight_sync.region import Region


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


def sent(peers: Peers, path: Path, cut: Cut, encoders: int) -> tuple[bool, set[str]]:
    """Whether a sharded receiver has the weights of the files, and the names that this rank holds."""
    trainer = make(peers, path, cut, encoders)
    whole = iterate_weights(load_model(path, cut.dtype, "cpu", trust_remote_code=False))
    held = trainer.held_regions()
    same, _ = resharded(peers, trainer.model_state.metas(), held, whole)
    return same, {each.name for each in held}


def held(
    peers: Peers, path: Path, cut: Cut, step: JobStep, *, encoders: int, reference: bool
) -> tuple[dict[str, list[Region]], RankBytes]:
    """This rank's regions of the weights, and its bytes in and after a step."""
    trainer = make(peers, path, cut, encoders)
    mine = dealt(step, range(len(step.groups)), peers.rank, cut, encoders)
    groups = [step.groups[each] for each in mine]
    trainer.prepare_logprobs(build_chunk(groups), policy=True, reference=reference, temperature=1.0)
    key = feed(trainer, step, 1, StepKey(1, 1, 0), cut, encoders)
    gradients = _nbytes(_gradients(trainer))
    trainer.finish_train_step(key)
    kinds = trainer.optimizer.state()
    weights = _nbytes(trainer.model_state.local_weights.values())
    if not isinstance(trainer, MegatronTrainer):
        # Its masters are the weights that passes compute with, in 16 bits while they do.
        kinds = {kind: kinds.get(kind, {}) for kind in MOMENTS}  # a frozen tower has none
        towers = [trainer._tower.model]  # noqa: SLF001 -- no public place has them
        if reference:
            towers.append(trainer.passes.load(REFERENCE_LOGPROBS, None))
        weights = sum(_nbytes([*each.parameters(), *each.buffers()]) for each in towers)
    state = sum(_nbytes(kind.values()) for kind in kinds.values())
    regions = dict[str, list[Region]]()
    for each in trainer.held_regions():
        regions.setdefault(each.name, []).append(each.region)
    return regions, RankBytes(weights, gradients, state)


def _gradients(trainer: Any) -> Iterable[Tensor]:
    if isinstance(trainer, MegatronTrainer):
        return main_grads(trainer.model).values()
    parameters = trainer._tower.model.parameters()  # noqa: SLF001 -- as above
    return [each.grad for each in parameters if each.grad is not None]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(own(each).nbytes for each in tensors)
