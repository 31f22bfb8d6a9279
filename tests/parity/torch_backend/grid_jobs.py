"""What the ranks of a grid are asked to do: language ranks and encoder ranks. Runs in workers only."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from activations import Activations, recorded
from parity_cases import TOKENS, Cut, Step, chunked
from reshard_jobs import resharded
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch_backend.torch_bugs import Exact, ExactPictures, PlantedLoader
from torch_backend.torch_jobs import as_arrays, gradients

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.models.media_canaries import canary_prompts
from offbeat.plugins.encoder_ranks.encoding import EncoderPasses
from offbeat.plugins.encoder_ranks.errors import ProvenanceMismatch
from offbeat.plugins.encoder_ranks.lane import LanePasses
from offbeat.plugins.encoder_ranks.loading import GridLoader
from offbeat.plugins.encoder_ranks.plugin import EncoderConfig
from offbeat.plugins.encoder_ranks.torch_parts import GridState, wrap_passes
from offbeat.trainers.ranks.dispatch import Replicas, shares
from offbeat.trainers.ranks.peers import PeerFailed, Peers
from offbeat.trainers.torch.model import load_model
from offbeat.trainers.torch.sharding import iterate_sharded_modules, own
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.transfer_queue.schema import REFERENCE_LOGPROBS
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync.chunks import iterate_weights
from offbeat.weight_sync.region import Region


class PlantedGridLoader(PlantedLoader, GridLoader):
    pass


class ExactGrid(ExactPictures):
    loader = PlantedGridLoader
    Encoder: type[EncoderPasses] = EncoderPasses
    Lane: type[LanePasses] = LanePasses

    def exact_parts(self) -> TorchParts:
        wrap = partial(wrap_passes, encoder=self.Encoder, lane=self.Lane)
        return replace(super().exact_parts(), state=GridState, passes=wrap)


class ExactLanguage(ExactGrid):
    pass


class ExactEncoder(ExactGrid):
    pass


class SwapsLanes(ExactEncoder):
    """Sends each lane the features of another."""

    class Encoder(EncoderPasses):
        def _parts(self, batch: Any, made: Any) -> Any:
            return super()._parts(batch, made)[::-1]


class AveragesOverTheWorld(ExactEncoder):
    """Averages the tower's gradients with those of ranks that hold none of it."""

    def plant(self, model: Any) -> None:
        for each in iterate_sharded_modules(model):
            each.set_gradient_divide_factor(float(self.peers.size))


class CountsOneLane(ExactEncoder):
    """Divides the tower's gradients by the tokens of one lane."""

    def before_update(self, denominator: float) -> float:
        return denominator / self._config.data_parallel


class DealsAsLanes(ExactEncoder):
    """Is dealt groups of its own, apart from those of the ranks that share its matrices."""


class KeepsParts(ExactEncoder):
    """Adds up nowhere the gradients of what the columns of ``fc1`` read."""

    def plant(self, model: Any) -> None:
        mesh = self.axes.tensor
        for name, module in model.named_modules():
            if name.endswith("mlp.fc1"):
                hook = partial(_read_without_a_sum, mesh)
                module.register_forward_pre_hook(hook, prepend=True)


def _read_without_a_sum(mesh: Any, _: Any, inputs: Any) -> Any:
    return (_OwnPart.apply(inputs[0], mesh), *inputs[1:])


class _OwnPart(torch.autograd.Function):
    """Hands a whole input to divided columns, and this rank's part of its gradient back."""

    @staticmethod
    def forward(_: Any, whole: Tensor, mesh: Any) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(_: Any, gradient: DTensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.to_local(), None


class RoundsFeatures(ExactEncoder):
    """Sends features with eight bits, and has the tower's own right."""

    class Encoder(EncoderPasses):
        def _parts(self, batch: Any, made: Any) -> Any:
            return [each.bfloat16().to(each.dtype) for each in super()._parts(batch, made)]


KINDS = {
    each.__name__: each
    for each in (
        ExactEncoder,
        SwapsLanes,
        AveragesOverTheWorld,
        CountsOneLane,
        RoundsFeatures,
        DealsAsLanes,
        KeepsParts,
    )
}


def make(
    peers: Peers,
    path: Path,
    cut: Cut,
    freeze: tuple[str, ...],
    lanes: int,
    encoders: int,
    **kinds: Any,
) -> Any:
    """A trainer of one rank; without encoders of a world whose ranks hold both sides."""
    kind: type[Exact] = ExactPictures
    if encoders:
        kind = kinds.get("language", ExactLanguage)
        if peers.rank >= lanes * cut.tensor:
            kind = kinds.get("encoder", ExactEncoder)
    return kind(
        path,
        trainer=TorchTrainerConfig(
            max_tokens_per_microbatch=cut.max_tokens,
            shared_prompt=cut.shared_prompt,
            activation_checkpointing=cut.recompute,
            optimizer=OptimizerConfig.model_validate(cut.optimizer),
            freeze=freeze,
            data_parallel=lanes,
            tensor_parallel=cut.tensor,
            **dict[str, Any](encoder=encoder_config(cut, encoders)),
        ),
        model=ModelConfig.model_validate({"path": str(path), "dtype": cut.dtype}),
        total_steps=10,
        max_model_len=128,
        peers=peers,
    )


def encoder_config(cut: Cut, encoders: int) -> EncoderConfig | None:
    if not encoders:
        return None
    return EncoderConfig(
        data_parallel=encoders,
        tensor_parallel=cut.encoder_tensor,
        max_tokens_per_microbatch=cut.picture_tokens,
    )


def dealt(trainer: Any, step: Step, prompt_indices: Sequence[int]) -> list[int]:
    """This rank's groups of a chunk, dealt as in production."""
    sizes = {
        each: len(step.groups[each]["prompt_ids"]) + len(step.groups[each]["response_ids"])
        for each in prompt_indices
    }
    replicas = Replicas.of(trainer._config)  # noqa: SLF001 -- said nowhere else
    if isinstance(trainer, DealsAsLanes):
        encoders = replicas.encoders * replicas.encoder_tensor
        replicas = replace(replicas, encoders=encoders, encoder_tensor=1)
    parts = shares(sizes, replicas.data)
    return [each for lane in replicas.list_shares(trainer.peers.rank) for each in parts[lane]]


def feed(trainer: Any, step: Step, loss: LossSpec, chunks: int, key: StepKey) -> StepKey:
    trainer.begin_train_step(key, loss)
    for part in chunked(len(step.groups), chunks):
        key, own = key.next(), dealt(trainer, step, part)
        trainer.train_microbatch(
            key,
            build_chunk([step.groups[i] for i in own]),
            [step.advantages[i] for i in own],
            [i % loss.minibatches for i in own],
        )
    return key.next()


def stepped(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    freeze: tuple[str, ...] = (),
    loss: LossSpec = TOKENS,
    chunks: Sequence[int] = (1, 2, 8),
    kind: str = "ExactEncoder",
) -> dict[str, Any]:
    """Logprobs and gradients of a step, in so many chunks, and the weights after it."""
    trainer = make(peers, path, cut, freeze, lanes, encoders, encoder=KINDS[kind])
    own = dealt(trainer, step, range(len(step.groups)))
    groups = [step.groups[each] for each in own]
    seen: dict[str, Any] = {"initial": trainer.weights_digest(), "gradients": {}}
    written = trainer.prepare_logprobs(
        build_chunk(groups), policy=True, reference=True, temperature=1.0
    )
    seen["logprobs"] = dict(zip(own, written, strict=True)) if any(written) else {}
    prompts = canary_prompts(trainer.vocabulary, trainer.media_rules)
    seen["canary"] = trainer.top_logprobs(prompts, 4)
    for attempt, count in enumerate(chunks, start=1):
        key = feed(trainer, step, loss, count, StepKey(1, attempt, 0))
        seen["gradients"][count] = gradients(trainer)
        if count != chunks[-1]:
            trainer.abort_train_step(key)
    seen["result"] = trainer.finish_train_step(key)
    seen["digest"] = trainer.weights_digest()
    weights = dict(trainer.iterate_weights())
    seen["weights"] = as_arrays(weights) if trainer.is_first else {}
    seen["parameters"], seen["identity"] = trainer.parameters, trainer.identity
    return seen


def refusal(
    peers: Peers, path: Path, cut: Cut, step: Step, *, lanes: int, encoders: int, kind: str
) -> str:
    """The name of the error with which this rank ends a step."""
    trainer = make(peers, path, cut, (), lanes, encoders, encoder=KINDS[kind])
    try:
        feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    except (PeerFailed, ProvenanceMismatch) as error:
        return type(error).__name__
    return ""


def seen_inside(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    names: Sequence[str],
    kind: str = "ExactEncoder",
) -> Activations:
    """What the modules that this rank holds return in the passes of a step in one chunk."""
    trainer = make(peers, path, cut, (), lanes, encoders, encoder=KINDS[kind])
    with recorded(trainer.module, names) as found:
        key = feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    trainer.abort_train_step(key)
    return found


def taken(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    count: int,
    load: Path | None,
    save: Path | None,
) -> tuple[list[float], list[str], dict[str, Any]]:
    """Rates of so many steps from a state on, the digests after them, and the weights on rank 0."""
    trainer: Any = make(peers, path, cut, (), lanes, encoders)
    if load is not None:
        trainer.load_state(load)
    rates, digests = list[float](), [trainer.weights_digest()]
    for _ in range(count):
        number = trainer.steps_applied + 1
        end = feed(trainer, step, TOKENS, 2, StepKey(number, number, 0))
        rates.append(trainer.finish_train_step(end).learning_rate)
        digests.append(trainer.weights_digest())
    if save is not None:
        trainer.save_state(save)
    weights = dict(trainer.iterate_weights())
    return rates, digests, as_arrays(weights) if trainer.is_first else {}


def continued(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    load: Path | None,
    save: Path | None,
) -> dict[str, Any]:
    """Load a state, take a step, save the state; and what the weights were before and after."""
    trainer = make(peers, path, cut, (), lanes, encoders)
    if load is not None:
        trainer.load_state(load)
    number, seen = trainer.steps_applied + 1, {"loaded": trainer.weights_digest()}
    key = StepKey(number, number, 0)
    trainer.finish_train_step(feed(trainer, step, TOKENS, 2, key))
    if save is not None:
        trainer.save_state(save)
    weights = dict(trainer.iterate_weights())
    return {
        **seen,
        "saved": trainer.weights_digest(),
        "weights": as_arrays(weights) if trainer.is_first else {},
    }


def held(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    freeze: tuple[str, ...],
    loss: LossSpec,
    reference: bool,
) -> tuple[dict[str, Region], RankBytes]:
    """This rank's regions of the weights, and its bytes in and after a step."""
    trainer = make(peers, path, cut, freeze, lanes, encoders)
    own_groups = dealt(trainer, step, range(len(step.groups)))
    groups = [step.groups[each] for each in own_groups]
    trainer.prepare_logprobs(build_chunk(groups), policy=True, reference=reference, temperature=1.0)
    key = feed(trainer, step, loss, 1, StepKey(1, 1, 0))
    gradients = _nbytes(each.grad for each in trainer.module.parameters() if each.grad is not None)
    trainer.finish_train_step(key)
    kept = [trainer.module]
    if reference:
        kept.append(trainer.passes.load(REFERENCE_LOGPROBS, None))
    weights = sum(_nbytes([*each.parameters(), *each.buffers()]) for each in kept)
    moments = _nbytes(trainer.updates.moments().values())
    regions = {each.name: each.region for each in trainer.weights.held_regions()}
    return regions, RankBytes(weights, gradients, moments)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(own(each).nbytes for each in tensors)


def sent(peers: Peers, path: Path, cut: Cut, *, lanes: int, encoders: int) -> tuple[bool, int]:
    """Whether a sharded receiver has the weights of the files, and the bytes that this rank holds."""
    trainer = make(peers, path, cut, (), lanes, encoders)
    whole = iterate_weights(load_model(path, cut.dtype, "cpu", trust_remote_code=False))
    held = trainer.held_regions()
    same, _ = resharded(peers, list(trainer.weights.metas()), held, whole)
    return same, sum(each.values.nbytes for each in held)
