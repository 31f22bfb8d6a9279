"""What the ranks of a test world do. Every job returns what can be pickled: numpy, not tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron_bugs import (
    GRADIENTS,
    LAYOUT_BUGS,
    OPTIMIZERS,
    Faulty,
    FaultyAdamW,
    Injected,
    LateRate,
    Recording,
    differences,
    hooked,
    main_grads,
    witness,
)
from megatron_cases import JobStep, Told
from megatron_model_bugs import MODEL_BUGS
from parity_cases import Arrays, chunked
from parity_cases import MegatronCut as Cut
from reshard_jobs import resharded
from torch import Tensor

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.plugins.megatron.boxed_state import BoxedState
from offbeat.plugins.megatron.checks import rank_parameters
from offbeat.plugins.megatron.cpu_shim import cpu_stands_in
from offbeat.plugins.megatron.errors import UnsupportedLayout
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.hf_files import view_box
from offbeat.plugins.megatron.mapping import is_router_bias
from offbeat.plugins.megatron.megatron_trainer import BackendParts, MegatronTrainer
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.ranks.assembly import build_source
from offbeat.trainers.ranks.dispatch import Replicas, shares
from offbeat.trainers.ranks.peers import Peers, WorldBroken
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync.manifest import Manifest, release_digest

# --- jobs --------------------------------------------------------------------------------------------


PEERS: list[Peers] = []
"""Of the job that is being run."""

TRAINERS: list[MegatronTrainer] = []
"""That it has made."""


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    PEERS[:] = [peers]
    with cpu_stands_in("cpu"):
        try:
            return globals()[name](**arguments)
        finally:
            forget_groups()
            take_apart()
            if peers.size == 1 and dist.is_initialized():
                dist.destroy_process_group()


def forget_groups() -> None:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def take_apart() -> None:
    """Gradient hooks hold a model, and the graph that its experts' dispatcher keeps holds the hooks.

    No collector sees that circle, and every model in it has process groups with threads of their own.
    """
    for trainer in TRAINERS:
        vars(trainer.ddp).clear()
    TRAINERS.clear()


def make(
    path: Path,
    cut: Cut,
    gradients: Callable[..., Gradients] = Recording,
    kind: type[MegatronTrainer] = MegatronTrainer,
    **keywords: Any,
) -> MegatronTrainer:
    forget_groups()
    trainer = kind(
        path,
        trainer=MegatronTrainerConfig(
            data_parallel=cut.data,
            tensor_parallel=cut.tensor,
            pipeline_parallel=cut.pipeline,
            context_parallel=cut.context,
            expert_parallel=cut.expert,
            expert_tensor_parallel=cut.expert_tensor,
            layers_per_stage=cut.stages,
            sequence_parallel=cut.sequence,
            max_tokens_per_microbatch=cut.max_tokens,
            shared_prompt=cut.shared_prompt,
            activation_checkpointing=cut.recompute,
            moe=MoeConfig.model_validate(cut.moe),
            optimizer=OptimizerConfig.model_validate(cut.optimizer),
        ),
        model=ModelConfig.model_validate({"path": str(path), "dtype": cut.dtype}),
        total_steps=10,
        peers=PEERS[0],
        parts=BackendParts(gradients, OPTIMIZERS[cut.updates], cut.overlap),
        **keywords,
    )
    TRAINERS.append(trainer)
    return trainer


def state_of(trainer: MegatronTrainer) -> BoxedState:
    assert isinstance(trainer.model_state, BoxedState)
    return trainer.model_state


def mine(trainer: MegatronTrainer, step: JobStep, groups: Sequence[int]) -> list[int]:
    """Those of these groups that this rank is dealt, as the driver deals them; maybe none."""
    tokens = {int(i): len(step.groups[i]["response_ids"]) for i in groups}
    return list(shares(tokens, trainer.layout.grid.data)[trainer.layout.data_rank])


def calls_of(
    trainer: MegatronTrainer, step: JobStep, chunks: int, key: StepKey
) -> list[Callable[[], Any]]:
    """The calls of a split step, in order."""
    calls: list[Callable[[], Any]] = [partial(trainer.begin_train_step, key, step.loss)]
    for part in chunked(len(step.groups), chunks):
        key = key.next()
        own = mine(trainer, step, part)
        chunk, advantages = (
            build_chunk(step.groups[i] for i in own),
            [step.advantages[i] for i in own],
        )
        minibatches = [i % step.loss.minibatches for i in own]
        calls.append(partial(trainer.train_microbatch, key, chunk, advantages, minibatches))
    calls.append(partial(trainer.finish_train_step, key.next()))
    return calls


def run_step(trainer: MegatronTrainer, step: JobStep, chunks: int, key: StepKey) -> Told:
    *calls, finish = calls_of(trainer, step, chunks, key)
    for call in calls:
        call()
    return outcome(trainer, finish())


def outcome(trainer: MegatronTrainer, result: StepResult) -> Told:
    recording = trainer.gradients
    assert isinstance(recording, Recording)
    reduced = recording.reduced or {}
    gradients = arrays(trainer, reduced) if reduced else {}
    weights = dict(trainer.iterate_weights())
    return Told(result, gradients, as_arrays(weights), agrees(trainer, weights))


def arrays(trainer: MegatronTrainer, values: dict[str, Tensor]) -> Arrays:
    """Whole gradients; a router's bias has none."""
    whole = trainer.gathering.all_tensors(state_of(trainer).local_weights | values)
    return as_arrays({name: each for name, each in whole if not is_router_bias(name)})


def as_arrays(tensors: dict[str, Tensor]) -> Arrays:
    return {name: each.float().numpy() if each.element_size() == 2 else each.numpy().copy()
            for name, each in tensors.items()}  # fmt: skip


def agrees(trainer: MegatronTrainer, weights: dict[str, Tensor]) -> bool:
    """Replicas and tied copies hold the same bits."""
    local = state_of(trainer).local_weights
    return all(
        bool((view_box(local, box) == weights[box.tensor][box.region.slices]).all())
        for box in state_of(trainer).boxes
    )


def split(path: Path, cut: Cut, step: JobStep, chunks: Sequence[int]) -> list[Told]:
    """The same step cut into so many chunks, by a new trainer each time."""
    outcomes = list[Told]()
    for count in chunks:
        trainer = make(path, cut)
        outcomes.append(run_step(trainer, step, count, StepKey(1, 1, 0)))
    return outcomes


def recomputed(path: Path, cut: Cut, step: JobStep) -> list[tuple[Told, int]]:
    """A step that keeps activations, and one that does not; passes through a layer in each."""
    outcomes = list[tuple[Told, int]]()
    for recompute in (False, True):
        trainer, passes = make(path, replace(cut, recompute=recompute)), list[None]()
        attention: Any = trainer.model.decoder.layers[0].self_attention  # pyright: ignore[reportAttributeAccessIssue]
        attention.register_forward_pre_hook(lambda *_, told=passes: told.append(None))
        outcomes.append((run_step(trainer, step, 2, StepKey(1, 1, 0)), len(passes)))
    return outcomes


def planted(path: Path, cut: Cut, step: JobStep, bug: str, count: int) -> Told | str:
    """The last of several equal steps of a trainer with a bug; or what the library said to it."""
    kind = (LAYOUT_BUGS | MODEL_BUGS).get(bug, MegatronTrainer)
    trainer = make(path, cut, GRADIENTS.get(bug, Recording), kind)
    last = None
    for number in range(1, count + 1):
        try:
            last = run_step(trainer, step, 3, StepKey(number, number, 0))
        except AssertionError as error:
            return f"step {number}: {error}"
    assert last is not None
    return last


def single(path: Path, cut: Cut, step: JobStep) -> Told:
    trainer = make(path, cut)
    own = mine(trainer, step, range(len(step.groups)))
    groups, advantages = [step.groups[i] for i in own], [step.advantages[i] for i in own]
    result = trainer.train(build_chunk(groups), advantages, step.loss)
    return outcome(trainer, result)


def steps(
    path: Path, cut: Cut, step: JobStep, count: int, *, late: bool = False, chunks: int = 2
) -> list[Told]:
    """Several steps on the same data."""
    trainer = make(path, cut, kind=LateRate if late else MegatronTrainer)
    outcomes = list[Told]()
    for number in range(1, count + 1):
        outcomes.append(run_step(trainer, step, chunks, StepKey(number, number, 0)))
    return outcomes


def aborted(path: Path, cut: Cut, step: JobStep) -> tuple[Told, Told]:
    """Two steps with one between them that is given up, and without."""
    outcomes = list[Told]()
    for disturbed in (True, False):
        trainer = make(path, cut)
        run_step(trainer, step, 2, StepKey(1, 1, 0))
        if disturbed:
            for call in calls_of(trainer, step, 2, StepKey(2, 2, 0))[:-1]:
                call()
            trainer.abort_train_step(StepKey(2, 2, 9))
        outcomes.append(run_step(trainer, step, 2, StepKey(2, 3, 0)))
    return outcomes[0], outcomes[1]


def logprobs(path: Path, cut: Cut, step: JobStep, temperature: float) -> list[Arrays]:
    trainer = make(path, cut)
    groups = [step.groups[i] for i in mine(trainer, step, range(len(step.groups)))]
    return list(
        trainer.prepare_logprobs(
            build_chunk(groups), policy=True, reference=True, temperature=temperature
        )
    )


def asked_in_between(
    path: Path, cut: Cut, step: JobStep, prompts: Sequence[Sequence[int]]
) -> tuple[list[Told], list[list[str]]]:
    """A step that computes logprobs and canaries behind each chunk, and one without; two steps each.

    Returns:
        The steps, and what differed behind those calls from before them.
    """
    outcomes, changed = list[Told](), list[list[str]]()
    for asks in (True, False):
        trainer = make(path, cut)
        own = [step.groups[i] for i in mine(trainer, step, range(len(step.groups)))]
        for number in (1, 2):
            *calls, finish = calls_of(trainer, step, 3, StepKey(number, number, 0))
            for call in calls:
                call()
                if asks:
                    before = witness(trainer)
                    trainer.prepare_logprobs(
                        build_chunk(own), policy=True, reference=True, temperature=1.0
                    )
                    trainer.top_logprobs(prompts, 4)
                    changed.append(differences(before, witness(trainer)))
            outcomes.append(outcome(trainer, finish()))
    return outcomes, changed


def top_logprobs(path: Path, cut: Cut, prompts: Sequence[Sequence[int]]) -> Any:
    return make(path, cut).top_logprobs(prompts, 8)


def quantized_logprobs(path: Path, cut: Cut, prompts: Sequence[Sequence[int]]) -> tuple[Any, bool]:
    """Of quantized matrices; and whether the weights have stayed what they were."""
    trainer = make(path, cut)
    digest = trainer.weights_digest()
    return trainer.top_logprobs(
        prompts, 8, quantize="fp8_block"
    ), trainer.weights_digest() == digest


def exported(
    path: Path, cut: Cut, target: Path, file_bytes: int = FILE_BYTES
) -> tuple[Arrays, str, int]:
    trainer = make(path, cut)
    trainer.save(target, file_bytes=file_bytes)
    weights = as_arrays(dict(trainer.iterate_weights()))
    return weights, trainer.weights_digest(), trainer.parameters


def saved(path: Path, cut: Cut, step: JobStep, directory: Path) -> tuple[Told, str]:
    """Two steps, the state after the first saved; what the second did."""
    trainer = make(path, cut)
    run_step(trainer, step, 2, StepKey(1, 1, 0))
    digest = trainer.weights_digest()
    trainer.save_state(directory)
    dist.barrier()
    return run_step(trainer, step, 2, StepKey(2, 2, 0)), digest


def loaded(path: Path, cut: Cut, step: JobStep, directory: Path) -> tuple[Told, str, str, int, Any]:
    """The second of those steps, by a trainer that took up the state; then all is set back."""
    trainer = make(path, cut)
    initial = trainer.weights_digest()
    trainer.begin_train_step(StepKey(1, 1, 0), step.loss)  # an open step is dropped
    trainer.load_state(directory)
    digest, applied = trainer.weights_digest(), trainer.steps_applied
    second = run_step(trainer, step, 2, StepKey(2, 2, 0))
    trainer.reset()
    return second, digest, initial, applied, (trainer.weights_digest(), trainer.steps_applied)


def refused(path: Path, cut: Cut, step: JobStep, options: dict[str, Any]) -> str:
    """What is raised where the library's description of a model has other options."""

    class Otherwise(MegatronTrainer):
        def _description(self) -> Any:
            config = super()._description()
            for name, value in options.items():
                setattr(config, name, value)
            return config

    try:
        run_step(make(path, cut, kind=Otherwise), step, 1, StepKey(1, 1, 0))
    except (AssertionError, RuntimeError, ValueError, UnsupportedLayout) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def places(
    path: Path, cut: Cut
) -> tuple[tuple[int, bool], dict[str, int | bool], dict[str, int | bool]]:
    """The place of this rank to the driver, to the layout and to the library."""
    layout, rank = make(path, cut).layout, dist.get_rank()
    replicas = Replicas(cut.data, cut.tensor, cut.pipeline, cut.context)
    own = {
        "tensor": layout.tensor_rank,
        "context": layout.context_rank,
        "data": layout.data_rank,
        "pipeline": layout.pipeline_rank,
        "expert": layout.expert_rank,
        "expert tensor": layout.expert_tensor_rank,
        "leader": layout.is_replica_leader,
    }
    library = {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "expert": parallel_state.get_expert_model_parallel_rank(),
        "expert tensor": parallel_state.get_expert_tensor_parallel_rank(),
        "leader": parallel_state.get_tensor_and_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(),
    }
    return (replicas.find_share(rank), rank in replicas.leaders), own, library


def held(path: Path, cut: Cut, step: JobStep) -> tuple[dict[str, Any], dict[str, Any], RankBytes]:
    """Shapes of this rank's parameters as declared and as they are, and its bytes after a step."""
    trainer = make(path, cut)
    run_step(trainer, step, 1, StepKey(1, 1, 0))
    shapes = {name: tuple(each.shape) for name, each in trainer.model.named_parameters()}
    kinds = trainer.optimizer.state().values()
    measured = RankBytes(
        sum(each.nbytes for each in state_of(trainer).local_weights.values()),
        sum(each.nbytes for each in main_grads(trainer.model).values()),
        sum(each.nbytes for kind in kinds for each in kind.values()),
    )
    return rank_parameters(trainer.architecture, trainer.layout), shapes, measured


def identities(path: Path, cut: Cut) -> tuple[Any, int]:
    trainer = make(path, cut)
    return trainer.identity, trainer.state_nbytes


def released(
    path: Path, cut: Cut, step: JobStep, generator: str, target: Path
) -> tuple[Manifest, list[Any], str]:
    """What the engines of a run are sent after a step, from the first rank; the model is saved, too."""
    trainer = make(path, cut)
    run_step(trainer, step, 1, StepKey(1, 1, 0))
    trainer.save(target)
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": str(path), "dtype": cut.dtype},
            "generator": {"backend": generator},
            "sync": {"chunk_mib": 0.02},
        }
    )
    spec = TrainerSpec(config, run_dir="")
    source = build_source(spec, trainer.model_state.metas(), trainer.iterate_weights)
    if dist.get_rank():
        source.take_part()
        return source.manifest, [], ""
    chunks = list(source.chunks())
    digest = release_digest(source.manifest, [each for _, each in chunks])
    return source.manifest, [data for data, _ in chunks], digest


def sent(path: Path, cut: Cut) -> tuple[bool, int]:
    """The weights on their way to two sharded receivers, from the ranks that hold them."""
    trainer = make(path, cut)
    whole = dict(trainer.iterate_weights())
    return resharded(PEERS[0], trainer.model_state.metas(), trainer.held_regions(), whole.items())


def fault(
    path: Path, cut: Cut, step: JobStep, site: str, failing: Sequence[int]
) -> tuple[str, list[str], Told]:
    """A step that fails at ``site`` on some ranks, is aborted on all, and is then done again.

    Returns:
        What was raised, what was not as before begin, and the second attempt.
    """
    trainer = make(path, cut, Faulty)
    gradients, optimizer = trainer.gradients, trainer.optimizer
    assert isinstance(gradients, Faulty) and isinstance(optimizer, FaultyAdamW)
    before = witness(trainer)
    raised, handle = "", None
    if dist.get_rank() in failing:
        gradients.site = optimizer.site = site
        handle = hooked(trainer, site)
    loss = step.loss
    if site == "loss":
        loss = replace(loss, config=loss.config.model_copy(update={"name": "no such loss"}))
    calls = calls_of(trainer, replace(step, loss=loss), 3, StepKey(1, 1, 0))
    for call in calls:
        try:
            call()
        except (Injected, KeyError) as error:
            raised = f"{type(error).__name__}: {error}"
        if any_rank(raised):  # as a gang: who fails stops all
            break
    changed = differences(before, witness(trainer)) if raised else []
    trainer.abort_train_step(StepKey(1, 1, 99))
    trainer.abort_train_step(StepKey(1, 1, 99))
    changed += [f"after abort: {each}" for each in differences(before, witness(trainer))]
    gradients.site = optimizer.site = ""
    if handle is not None:
        handle.remove()
    return raised, changed, run_step(trainer, step, 3, StepKey(1, 2, 0))


def pipeline_fault(path: Path, cut: Cut, step: JobStep) -> tuple[str, list[str]]:
    """A chunk that fails on every stage: what was raised, and what it left behind."""
    trainer = make(path, cut, Faulty)
    assert isinstance(trainer.gradients, Faulty)
    trainer.gradients.site, before, raised = "no_sync", witness(trainer), ""
    begin, microbatch, *_ = calls_of(trainer, step, 2, StepKey(1, 1, 0))
    begin()
    try:
        microbatch()
    except WorldBroken as error:
        raised = f"{type(error).__name__}: {error}"
    return raised, differences(before, witness(trainer))


def any_rank(raised: str) -> bool:
    everybody: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, raised)
    return any(everybody)
