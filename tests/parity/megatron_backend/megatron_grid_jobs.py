"""What the ranks of a grid are asked to do: language ranks of megatron-core, and encoder ranks beside them.

Runs in workers only.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from megatron_bugs import OPTIMIZERS, Recording
from megatron_cases import JobStep
from megatron_jobs import TRAINERS, as_arrays, forget_groups, take_apart
from parity_cases import MegatronCut as Cut
from parity_cases import chunked
from torch import Tensor
from torch_backend.grid_jobs import encoder_config
from torch_backend.torch_bugs import PlantedUpdates

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.messages.fences import StepKey
from offbeat.models.media_canaries import canary_prompts
from offbeat.plugins.encoder_ranks.bridge import gradient_dtype
from offbeat.plugins.encoder_ranks.encoding import EncoderPasses
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.megatron.encoder import MegatronEncoderTrainer
from offbeat.plugins.encoder_ranks.megatron.language import LanguageSide, StageLane
from offbeat.plugins.megatron.cpu_shim import cpu_stands_in
from offbeat.plugins.megatron.mapping import TOWER
from offbeat.plugins.megatron.megatron_trainer import BackendParts, MegatronTrainer, ModelSide
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.sharding import own
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support import grid_steps
from tests.support.image_text_models import exact_angles, exact_norms


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


def with_library(peers: Peers, job: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a job makes of its arguments, with megatron-core on the CPU."""
    with cpu_stands_in("cpu"):
        try:
            return job(peers, **arguments)
        finally:
            forget_groups()
            take_apart()
            if peers.size == 1 and dist.is_initialized():
                dist.destroy_process_group()


class KeepsItsPart(LanguageSide):
    """Sends back the gradient that one rank of its lane has."""

    class Lane(StageLane):
        def _sum_over_lane(self, gradient: Tensor) -> None:
            pass

    lane = Lane


class ExactEncoder(MegatronEncoderTrainer):
    """Computes norms and angles of all towers in float64."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.updates = PlantedUpdates(self.updates, self.before_update)

    def before_update(self, denominator: float) -> float:
        """Put the bug into gradients; return what the optimizer divides them by."""
        return denominator

    def _build(self, *, trained: bool) -> Any:
        tower = super()._build(trained=trained)
        exact_angles(exact_norms(tower.model))
        return tower


class SwapsLanes(ExactEncoder):
    """Sends each lane the features of another."""

    class Passes(EncoderPasses):
        def _parts(self, batch: Any, made: Any) -> Any:
            return super()._parts(batch, made)[::-1]

    passes_kind = Passes


class CountsItself(ExactEncoder):
    """Divides the tower's gradients by the ranks of the world as well."""

    def before_update(self, denominator: float) -> float:
        return denominator * self.peers.size


class RoundsFeatures(ExactEncoder):
    """Sends features with eight bits, and has the tower's own right."""

    class Passes(EncoderPasses):
        def _parts(self, batch: Any, made: Any) -> Any:
            return [each.bfloat16().to(each.dtype) for each in super()._parts(batch, made)]

    passes_kind = Passes


class NormOfItsOwn(LanguageSide):
    """Clips the language model by the norm of its own gradients."""

    def whole_norm(self, norm: float, denominator: float) -> float:
        super().whole_norm(norm, denominator)
        return norm


NAMES = msgspec.msgpack.Decoder(list[str])
LANGUAGE = {each.__name__: each for each in (LanguageSide, KeepsItsPart, NormOfItsOwn)}
ENCODER = {each.__name__: each for each in (ExactEncoder, SwapsLanes, CountsItself, RoundsFeatures)}


def make(
    peers: Peers,
    path: Path,
    cut: Cut,
    encoders: int,
    language: type[LanguageSide] = LanguageSide,
    encoder: type[MegatronEncoderTrainer] = ExactEncoder,
    kind: type[MegatronTrainer] = MegatronTrainer,
) -> Any:
    """A trainer of one rank; without encoders of a world whose ranks hold both sides."""
    forget_groups()
    config = MegatronTrainerConfig(
        data_parallel=cut.data,
        tensor_parallel=cut.tensor,
        pipeline_parallel=cut.pipeline,
        context_parallel=cut.context,
        expert_parallel=cut.expert,
        expert_tensor_parallel=cut.expert_tensor,
        layers_per_stage=cut.stages,
        moe=MoeConfig.model_validate(cut.moe),
        sequence_parallel=cut.sequence,
        max_tokens_per_microbatch=cut.max_tokens,
        shared_prompt=cut.shared_prompt,
        activation_checkpointing=cut.recompute,
        optimizer=OptimizerConfig.model_validate(cut.optimizer),
        freeze=cut.freeze,
        **dict[str, Any](encoder=encoder_config(cut, encoders)),
    )
    given: dict[str, Any] = {
        "trainer": config,
        "model": ModelConfig.model_validate({"path": str(path), "dtype": cut.dtype}),
        "total_steps": 10,
        "peers": peers,
    }
    if encoders and side_grid(config).find_side(peers.rank) is Side.TOWER:
        return encoder(path, **given)
    side = language if encoders else ModelSide
    parts = BackendParts(Recording, OPTIMIZERS[cut.updates], cut.overlap, side)
    trainer = kind(path, **given, parts=parts)
    TRAINERS.append(trainer)
    return trainer


def dealt(step: JobStep, prompt_indices: Sequence[int], rank: int, cut: Cut, encoders: int) -> Any:
    """This rank's groups of a chunk."""
    return grid_steps.dealt(step.groups, prompt_indices, replicas_of(cut, encoders), rank)


def replicas_of(cut: Cut, encoders: int) -> Replicas:
    return Replicas(cut.data, cut.tensor, cut.pipeline, cut.context, encoders, cut.encoder_tensor)


def feed(
    trainer: Any, step: JobStep, chunks: int, key: StepKey, cut: Cut, encoders: int
) -> StepKey:
    parts = chunked(len(step.groups), chunks)
    return grid_steps.feed(trainer, step, step.loss, parts, key, replicas_of(cut, encoders))


class Watched:
    """Takes the gradients of a step when they are complete, and before they are applied."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.kept: dict[str, Tensor] = {}
        self.updates = trainer.updates
        trainer.updates = self

    def begin(self) -> None:
        self.updates.begin()

    def drop_gradients(self) -> None:
        self.updates.drop_gradients()

    def step(self, denominator: float, rate: float) -> Any:
        trainer, kept = self.trainer, dict[str, Tensor]()
        if isinstance(trainer, MegatronEncoderTrainer):
            for name, each in trainer._tower.model.named_parameters():  # noqa: SLF001 -- as above
                if each.requires_grad or each.grad is not None:
                    part = own(each.detach()) * 0 if each.grad is None else own(each.grad)
                    kept[f"{TOWER}{name}"] = part / denominator
        result = self.updates.step(denominator, rate)
        if isinstance(trainer, MegatronTrainer):
            recording = trainer.gradients
            assert isinstance(recording, Recording)
            kept = recording.reduced or {}
        self.kept = kept
        return result


def gathered(trainer: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole gradients; what no rank has one of is left out."""
    dtype = gradient_dtype(next(iter(trainer.model_state.local_weights.values())).dtype)
    zeros = {name: each.to(dtype) * 0 for name, each in trainer.model_state.local_weights.items()}
    names = {box.tensor for box in trainer.model_state.boxes if box.parameter in gradients}
    everywhere = set().union(*trainer.peers.all_gather(sorted(names), NAMES))
    whole = trainer.gathering.all_tensors(zeros | gradients)
    return {name: each for name, each in whole if name in everywhere}


def stepped(
    peers: Peers, path: Path, cut: Cut, step: JobStep, encoders: int, chunks: int, bug: str = ""
) -> dict[str, Any]:
    """Logprobs and gradients of a step, and the weights after it."""
    language = LANGUAGE.get(bug, LanguageSide)
    encoder = ENCODER.get(bug, ExactEncoder)
    trainer = make(peers, path, cut, encoders, language, encoder)
    mine = dealt(step, range(len(step.groups)), peers.rank, cut, encoders)
    seen: dict[str, Any] = {"initial": trainer.weights_digest()}
    written = trainer.prepare_logprobs(
        build_chunk([step.groups[each] for each in mine]),
        policy=True,
        reference=True,
        temperature=1.0,
    )
    seen["logprobs"] = dict(zip(mine, written, strict=True)) if any(written) else {}
    seen["canary"] = trainer.top_logprobs(
        canary_prompts(trainer.vocabulary, trainer.media_rules), 4
    )
    watched = Watched(trainer)
    seen["result"] = trainer.finish_train_step(
        feed(trainer, step, chunks, StepKey(1, 1, 0), cut, encoders)
    )
    seen["gradients"] = as_arrays(gathered(trainer, watched.kept))
    seen["weights"] = as_arrays(dict(trainer.iterate_weights()))
    seen["digest"], seen["parameters"] = trainer.weights_digest(), trainer.parameters
    seen["identity"] = trainer.identity
    seen["held"] = sum(each.numel() for each in trainer.model_state.local_weights.values())
    return seen


def continued(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: JobStep,
    encoders: int,
    load: Path | None,
    save: Path | None,
) -> dict[str, Any]:
    """Load a state, take a step, save the state; and what the weights were before and after."""
    trainer = make(peers, path, cut, encoders)
    initial = trainer.weights_digest()
    if load is not None:
        trainer.load_state(load)
    number, seen = trainer.steps_applied + 1, {"loaded": trainer.weights_digest()}
    key = feed(trainer, step, 2, StepKey(number, number, 0), cut, encoders)
    trainer.finish_train_step(key)
    if save is not None:
        trainer.save_state(save)
        dist.barrier() if peers.size > 1 else None
    seen |= {
        "saved": trainer.weights_digest(),
        "weights": as_arrays(dict(trainer.iterate_weights())),
    }
    trainer.reset()
    return {**seen, "reset": trainer.weights_digest() == initial}
