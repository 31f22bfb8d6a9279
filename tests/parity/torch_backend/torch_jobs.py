"""What the ranks of a world are asked to do. Runs in workers only."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from parity_cases import Arrays, Cut, Outcome, Step, chunked
from reshard_jobs import resharded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch_backend.torch_bugs import KINDS, Exact, Failing, Injected, Scattered, Unsharded

from offbeat.algorithms.custom_loss import CustomLoss
from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.failures import SchemaError
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.ranks.dispatch import Replicas, shares
from offbeat.trainers.ranks.peers import PeerFailed, Peers
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.pass_room import PassRoom
from offbeat.trainers.torch.sharding import own
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.dtypes import WirePolicy


def make(peers: Peers, path: Path, cut: Cut, kind: type[TorchTrainer] = Exact) -> Any:
    return kind(
        path,
        trainer=TorchTrainerConfig(
            max_tokens_per_microbatch=cut.max_tokens,
            shared_prompt=cut.shared_prompt,
            activation_checkpointing=cut.recompute,
            data_parallel=peers.size // cut.tensor,
            tensor_parallel=cut.tensor,
            moe=MoeConfig.model_validate(cut.moe),
            optimizer=OptimizerConfig.model_validate(cut.optimizer),
        ),
        model=ModelConfig.model_validate({"path": str(path), "dtype": cut.dtype}),
        total_steps=10,
        max_model_len=128,
        peers=peers,
        losses={**LOSSES, "custom": CustomLoss(clipped, "parity:clipped")},
    )


def clipped(tokens: LossTokens, options: dict[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
    """``clipped_pg`` as a user would write it."""
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
    bounded_N = ratio_N.clamp(1 - options["clip_low"], 1 + options["clip_high"])
    loss_N = -torch.minimum(ratio_N * tokens.advantages_N, bounded_N * tokens.advantages_N)
    return loss_N, {"ratio": ratio_N}


def mine(trainer: TorchTrainer, step: Step, prompt_indices: Sequence[int]) -> list[int]:
    """This rank's share of a chunk, dealt as in production."""
    if isinstance(trainer, Unsharded):
        return list(prompt_indices)
    sizes = {
        each: len(step.groups[each]["prompt_ids"]) + len(step.groups[each]["response_ids"])
        for each in prompt_indices
    }
    tensor = trainer._config.tensor_parallel  # noqa: SLF001 -- said nowhere else
    if isinstance(trainer, Scattered):
        tensor = 1
    replicas = Replicas(trainer.peers.size // tensor, tensor)
    return list(shares(sizes, replicas.data)[replicas.find_share(trainer.peers.rank)])


def feed(trainer: TorchTrainer, step: Step, loss: LossSpec, chunks: int, key: StepKey) -> StepKey:
    trainer.begin_train_step(key, loss)
    for part in chunked(len(step.groups), chunks):
        key, own = key.next(), mine(trainer, step, part)
        trainer.train_microbatch(
            key,
            build_chunk([step.groups[i] for i in own]),
            [step.advantages[i] for i in own],
            [i % loss.minibatches for i in own],
        )
    return key.next()


def gradients(trainer: TorchTrainer) -> Arrays:
    return as_arrays(
        {
            name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
            for name, each in trainer.module.named_parameters()
            if each.grad is not None
        }
    )


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(own(each).nbytes for each in tensors)


def as_arrays(tensors: dict[str, Tensor]) -> Arrays:
    return {name: each.detach().double().numpy().copy() for name, each in tensors.items()}


def split(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    loss: LossSpec,
    chunks: Sequence[int],
    kind: str = "Exact",
) -> Outcome:
    """The step in so many chunks, and in so many; all attempts but the last are aborted."""
    trainer = make(peers, path, cut, KINDS[kind])
    seen = dict[int, Arrays]()
    for attempt, count in enumerate(chunks, start=1):
        key = feed(trainer, step, loss, count, StepKey(1, attempt, 0))
        seen[count] = gradients(trainer)
        if count != chunks[-1]:
            trainer.abort_train_step(key)
        else:
            return outcome(trainer, trainer.finish_train_step(key), seen)
    raise AssertionError("unreachable: there are chunks")


def single(peers: Peers, path: Path, cut: Cut, step: Step, loss: LossSpec) -> Outcome:
    trainer = make(peers, path, cut)
    own = mine(trainer, step, range(len(step.groups)))
    result = trainer.train(
        build_chunk([step.groups[i] for i in own]),
        [step.advantages[i] for i in own],
        loss,
        [i % loss.minibatches for i in own],
    )
    return outcome(trainer, result, {})


def trained(
    peers: Peers, path: Path, cut: Cut, step: Step, loss: LossSpec, count: int
) -> list[Outcome]:
    """Several steps on the same data."""
    trainer = make(peers, path, cut)
    own = mine(trainer, step, range(len(step.groups)))
    groups, advantages = [step.groups[i] for i in own], [step.advantages[i] for i in own]
    return [
        outcome(trainer, trainer.train(build_chunk(groups), advantages, loss), {})
        for _ in range(count)
    ]


def balanced(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    loss: LossSpec,
    kind: type[TorchTrainer] = Exact,
) -> list[Outcome]:
    """Three steps in two chunks each, their groups alternating between the minibatches.

    Several minibatches have no gradients before their step is finished.
    """
    trainer, outcomes = make(peers, path, cut, kind), list[Outcome]()
    for number in range(1, 4):
        key = feed(trainer, step, loss, 2, StepKey(number, number, 0))
        seen = {2: gradients(trainer)}
        outcomes.append(outcome(trainer, trainer.finish_train_step(key), seen))
    return outcomes


def outcome(trainer: TorchTrainer, result: StepResult, seen: dict[int, Arrays]) -> Outcome:
    weights = as_arrays(dict(trainer.iterate_weights()))
    return Outcome(result, seen, weights, trainer.weights_digest())


def initial(peers: Peers, path: Path, cut: Cut) -> tuple[Arrays, str]:
    trainer = make(peers, path, cut)
    return as_arrays(dict(trainer.iterate_weights())), trainer.weights_digest()


def top_logprobs(
    peers: Peers, path: Path, cut: Cut, step: Step, prompts: Sequence[Sequence[int]]
) -> tuple[Any, str, str]:
    """In the midst of a step; digests of that step, and of one without them."""
    digests = list[str]()
    answer = None
    for asks in (True, False):
        trainer = make(peers, path, cut)
        key = feed(trainer, step, LossSpec(), 1, StepKey(1, 1, 0))
        if asks:
            answer = trainer.top_logprobs(prompts, 8)
        trainer.finish_train_step(key)
        digests.append(trainer.weights_digest())
    return answer, digests[0], digests[1]


def quantized_logprobs(
    peers: Peers, path: Path, cut: Cut, prompts: Sequence[Sequence[int]]
) -> tuple[Any, Any, bool]:
    """Of quantized matrices, and of the weights as they are; and whether these have stayed."""
    trainer = make(peers, path, cut)
    digest, plain = trainer.weights_digest(), trainer.top_logprobs(prompts, 8)
    quantized = trainer.top_logprobs(prompts, 8, quantize="fp8_block")
    stays = trainer.weights_digest() == digest and trainer.top_logprobs(prompts, 8) == plain
    return quantized, plain, stays


def logprobs(
    peers: Peers, path: Path, cut: Cut, step: Step, temperature: float, teacher: Path
) -> dict[int, Arrays]:
    """Of this rank's groups, by index: before a step, and after one, when only they have moved."""
    trainer = make(peers, path, cut)
    own = mine(trainer, step, range(len(step.groups)))
    groups = [step.groups[i] for i in own]

    def both() -> list[Any]:
        return trainer.prepare_logprobs(
            build_chunk(groups),
            policy=True,
            reference=True,
            temperature=temperature,
            teacher=str(teacher),
        )

    before = both()
    trainer.finish_train_step(feed(trainer, step, LossSpec(), 1, StepKey(1, 1, 0)))
    return {
        prompt_index: {f"before/{n}": v for n, v in old.items()}
        | {f"after/{n}": v for n, v in new.items()}
        for prompt_index, old, new in zip(own, before, both(), strict=True)
    }


def steps_from(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    count: int,
    load: Path | None = None,
    save: Path | None = None,
) -> tuple[list[tuple[float, float, float]], str]:
    """Load a state, take steps, save the state; the numbers of each step, and the weights' digest."""
    trainer = make(peers, path, cut)
    if load is not None:
        trainer.load_state(load)
    numbers = list[tuple[float, float, float]]()
    for _ in range(count):
        number = trainer.steps_applied + 1
        result = trainer.finish_train_step(
            feed(trainer, step, LossSpec(), 2, StepKey(number, number, 0))
        )
        assert result.applied
        numbers.append((result.loss, result.grad_norm, result.learning_rate))
    if save is not None:
        trainer.save_state(save)
    return numbers, trainer.weights_digest()


def exported(
    peers: Peers, path: Path, cut: Cut, target: Path, file_bytes: int = FILE_BYTES
) -> tuple[str, int, Any]:
    trainer = make(peers, path, cut)
    trainer.save(target, file_bytes=file_bytes)
    return trainer.weights_digest(), trainer.parameters, trainer.identity


def published(peers: Peers, path: Path, cut: Cut, chunk_bytes: int) -> list[bytes]:
    """Every chunk, from the first rank."""
    trainer = make(peers, path, cut)
    source = GatheredSource(
        trainer.weights.metas(), trainer.iterate_weights, chunk_bytes, WirePolicy("bfloat16")
    )
    if peers.rank:
        source.take_part()
        return []
    return [source.manifest.digest.encode(), *(c.tobytes() for c, _ in source.chunks())]


def sent(peers: Peers, path: Path, cut: Cut) -> tuple[bool, int]:
    """The weights on their way to two sharded receivers, from the ranks that hold them."""
    trainer = make(peers, path, cut)
    whole = dict(trainer.iterate_weights())
    return resharded(peers, trainer.weights.metas(), trainer.held_regions(), whole.items())


# --- failures --------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(each, name)) for each in model.modules() for name in names)


def failed_then_retried(
    peers: Peers, path: Path, cut: Cut, step: Step, site: str, on: Sequence[int]
) -> tuple[str, list[str], Outcome, Outcome]:
    """What was raised, what was left of it after the abort, and the retry beside an undisturbed step."""
    undisturbed, trainer = make(peers, path, cut), make(peers, path, cut, Failing)
    trainer.watch()
    spec = LossSpec()
    for each in (undisturbed, trainer):
        each.finish_train_step(feed(each, step, spec, 2, StepKey(1, 1, 0)))
    before = hooks(trainer.module), trainer.weights_digest(), torch.get_rng_state()
    trainer.arm(site, on, after=0 if site == "finish" else 1)
    raised = ""
    try:
        trainer.finish_train_step(feed(trainer, step, spec, 2, StepKey(2, 2, 0)))
    except (Injected, PeerFailed, SchemaError) as error:
        raised = type(error).__name__
    trainer.abort_train_step(StepKey(2, 2, 0))
    left = list[str]()
    if any(each.grad is not None for each in trainer.module.parameters()):
        left.append("gradients")
    if hooks(trainer.module) != before[0]:
        left.append(f"{hooks(trainer.module)} hooks, not {before[0]}")
    if trainer.weights_digest() != before[1]:
        left.append("weights")
    if not torch.equal(torch.get_rng_state(), before[2]):
        left.append("random numbers")
    outcomes = [
        outcome(each, each.finish_train_step(feed(each, step, spec, 2, StepKey(2, 3, 0))), {})
        for each in (trainer, undisturbed)
    ]
    return raised, left, outcomes[0], outcomes[1]


def short_of_memory(
    peers: Peers, path: Path, cut: Cut, step: Step, most_tokens: int
) -> tuple[str, int, Outcome, Outcome]:
    """What a step raised whose passes of ``most_tokens`` or more do not fit on the last rank.

    And the largest microbatch from then on, the step, retried if it was raised, and an undisturbed one.
    """
    trainer, undisturbed = make(peers, path, cut), make(peers, path, cut)
    room, raised = trainer.own_passes.room, ""
    if peers.rank == peers.size - 1:
        with contextlib.suppress(torch.OutOfMemoryError), room.measure_pass(most_tokens):
            raise torch.OutOfMemoryError("CUDA out of memory")
    try:
        result = trainer.finish_train_step(feed(trainer, step, LossSpec(), 1, StepKey(1, 1, 0)))
    except (torch.OutOfMemoryError, PeerFailed) as error:
        raised = type(error).__name__
        trainer.abort_train_step(StepKey(1, 1, 0))
        trainer.own_passes.room = PassRoom(torch.device("cpu"))
        result = trainer.finish_train_step(feed(trainer, step, LossSpec(), 1, StepKey(1, 2, 0)))
    whole = undisturbed.finish_train_step(feed(undisturbed, step, LossSpec(), 1, StepKey(1, 1, 0)))
    most = trainer.own_passes.planner.max_tokens
    return raised, most, outcome(trainer, result, {}), outcome(undisturbed, whole, {})


def logprobs_that_fail(peers: Peers, path: Path, cut: Cut, step: Step) -> tuple[str, str]:
    """Digests of a step in the midst of which preparing logprobs failed, and of one undisturbed."""
    digests = list[str]()
    for disturbed in (True, False):
        trainer = make(peers, path, cut, Failing)
        trainer.watch()
        own = mine(trainer, step, range(len(step.groups)))
        groups = [step.groups[i] for i in own]
        key = StepKey(1, 1, 0)
        trainer.begin_train_step(key, LossSpec())
        trainer.train_microbatch(key.next(), build_chunk(groups), [step.advantages[i] for i in own])
        if disturbed:
            trainer.arm("forward", range(peers.size), after=0)
            try:
                trainer.prepare_logprobs(
                    build_chunk(groups), policy=True, reference=False, temperature=1.0
                )
            except Injected:
                pass
            else:
                raise AssertionError("nothing was raised")
        trainer.finish_train_step(key.next().next())
        digests.append(trainer.weights_digest())
    return digests[0], digests[1]


def chunk_of_one_group(peers: Peers, path: Path, cut: Cut, step: Step) -> tuple[int, int, int]:
    """What is said of it, on this rank."""
    trainer = make(peers, path, cut)
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, LossSpec())
    own = mine(trainer, step, [0])
    reply = trainer.train_microbatch(
        key.next(), build_chunk([step.groups[i] for i in own]), [step.advantages[i] for i in own]
    )
    trainer.abort_train_step(key)
    return reply.microbatches, reply.tokens, reply.sequences


def loaded(peers: Peers, path: Path, cut: Cut, bare: Path | None = None) -> tuple[str, str]:
    """Digests of the weights as loaded, and after a step back to them. ``bare``: for all but the first."""
    trainer = make(peers, path if bare is None or not peers.rank else bare, cut)
    before = trainer.weights_digest()
    with torch.no_grad():
        for each in trainer.module.parameters():
            each.add_(1)
    trainer.reset()
    return before, trainer.weights_digest()
