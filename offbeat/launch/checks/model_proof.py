"""Checks that batched rows and cached decoding are exact for a model's class, without weights.

This module loads torch, which takes seconds. So it is imported only for recipes with a model.

It also estimates the memory that a torch trainer's microbatch needs in addition to weights,
gradients and moments.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.config.limits import find_moe, freeze_patterns, trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.environments.media_prompts import find_media
from offbeat.environments.tokenizer import find_tokenizer_files, load_tokenizer
from offbeat.generators.embedded.model import check_declared
from offbeat.generators.embedded.proof import prove_kind as prove_decoding
from offbeat.generators.end_tokens import (
    STOP_IDS_FIX,
    end_ids_of,
    end_ids_problem,
    stop_ids_problem,
)
from offbeat.generators.errors import NO_TOKENIZER_FIX, UndecodableModel
from offbeat.launch.checks.machine import Machine
from offbeat.messages.finding import Finding, error, ok, size, warning
from offbeat.models.loading import (
    WeightsMismatch,
    WeightsNotFinite,
    WeightsUntied,
    check_headers,
    check_values,
    generation_config_problem,
    model_without_memory,
)
from offbeat.models.media_rules import media_rules
from offbeat.rollouts.response_text import TextlessTokens
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.activation_bytes import activation_bytes
from offbeat.trainers.torch.model import freeze, frozen_parameters
from offbeat.trainers.torch.proof import prove_kind
from offbeat.trainers.torch.proof import prove_kind as prove_rows
from offbeat.trainers.torch.routing import check_routers, find_routers
from offbeat.trainers.trainer_plugin import TrainerPlugin, find_parts, find_trainer, freezing_part
from offbeat.transfer_queue.schema import Columns

_VALUES = "weight values"
_MOST_READ = 1 << 33  # bytes, read in some seconds; the start of a run reads all of them
_ROWS = "packed rows"
_DECODING = "decoding"
_ENDS = "end of samples"
_VOCABULARY = "vocabulary"
_TRAINED = "trained parameters"
_EXPERTS = "experts"


def check_model_proof(config: RunConfig) -> Iterator[Finding]:
    """Run the startup proofs of trainer and embedded engine, without weights."""
    decodes = config.generator.backend == "embedded"
    if config.trainer.backend == "stub" and not decodes:
        return
    trust = config.model.trust_remote_code
    try:
        model = model_without_memory(config.model.path, trust_remote_code=trust)
        check_headers(config.model.path, model)
    except (WeightsMismatch, WeightsUntied) as refused:
        yield error("model", f"{refused.subject}: {refused.problem}", f"{refused.fix}.")
        return
    except (OSError, ValueError, KeyError) as broken:
        message = f"transformers cannot make the model: {broken}".splitlines()[0]
        yield error("model", message, "Point model.path at a causal LM that transformers knows.")
        return
    yield from _values(config.model.path)
    if problem := generation_config_problem(config.model.path):
        fix = "Repair it: this run reads only its end tokens, and exports it unchanged."
        yield warning("generation_config.json", f"transformers refuses it: {problem}", fix)
    yield from _stop_tokens(config, model)
    yield from _vocabulary(config, model)
    for part in find_parts(config):
        yield from part.check_model(config, model)
    if patterns := freeze_patterns(config):
        yield _report_trained(model, patterns, find_trainer(config.trainer.backend))
    if config.trainer.backend == "torch" and (moe := find_moe(config)) is not None:
        yield _check_balance(model, moe)
    yield from find_media().check_model(config, model)
    if config.trainer.backend == "torch":
        yield _rows(config, model, shared_prompt=config.trainer.shared_prompt)
    if decodes:
        yield _decoding(config, model)


def _values(path: str) -> Iterator[Finding]:
    try:
        read, stored = check_values(path, _MOST_READ)
    except WeightsNotFinite as refused:
        yield error(_VALUES, f"{refused.subject}: {refused.problem}", f"{refused.fix}.")
    else:
        if stored:
            yield ok(_VALUES, f"{read / stored:.0%} of {stored / 1e9:.3g} GB are read, and finite")


def _check_balance(model: PreTrainedModel, moe: MoeConfig) -> Finding:
    try:
        check_routers(model, moe)
    except UntrainableModel as refused:
        return error(_EXPERTS, f"{refused.subject} {refused.problem}", f"{refused.fix}.")
    chosen = ", ".join(f"{name}={value:g}" for name, value in moe if value)
    return ok(_EXPERTS, f"{len(find_routers(model))} routers are balanced by {chosen}")


def _report_trained(
    model: PreTrainedModel, patterns: Sequence[str], plugin: TrainerPlugin | None
) -> Finding:
    """Report how much of the model is trained. Mark weights as frozen if a pattern matches."""
    try:
        if plugin is not None:
            plugin.check_frozen(model, patterns)
        freeze(model, patterns)
    except UntrainableModel as refused:
        return error(_TRAINED, f"{refused.subject} {refused.problem}", f"{refused.fix}.")
    every = list(model.parameters())
    count = sum(each.numel() for each in every)
    trained = [each for each in every if each.requires_grad]
    left = f"{sum(each.numel() for each in trained):,} of {count:,}"
    tensors = f"{len(trained)} of {len(every)} tensors"
    return ok(_TRAINED, f"{left}, in {tensors}; trainer.freeze excludes the rest")


def build_unfilled_model(config: RunConfig) -> PreTrainedModel | None:
    """Return the model without memory, or None if ``check_model_proof`` reports a problem."""
    path, trust = config.model.path, config.model.trust_remote_code
    try:
        return model_without_memory(path, trust_remote_code=trust)
    except (OSError, ValueError, KeyError):
        return None


def count_trained_parameters(config: RunConfig) -> int | None:
    """Return the number of trained parameters: additions of a part, or all except frozen ones.

    Return None if there are neither additions nor frozen parameters, or if the model or a pattern
    is refused.
    """
    patterns, part = freeze_patterns(config), freezing_part(config)
    if (not patterns and part is None) or (model := build_unfilled_model(config)) is None:
        return None

    try:
        if part is not None:
            return part.count_additions(config, model)
        frozen = frozen_parameters(model, patterns)
    except UntrainableModel:
        return None  # ``check_model_proof`` reports why
    return sum(each.numel() for each in model.parameters()) - sum(each.numel() for each in frozen)


def check_end_tokens(config: RunConfig) -> Iterator[Finding]:
    """Report a model whose samples would never end, or not at a stop string.

    The model's files must be complete.
    """
    if config.generator.backend == "stub":
        return
    stops, strings = config.generator.sampling.stop_token_ids, config.generator.sampling.stop
    if strings and not find_tokenizer_files(config.model.path):
        problem = (
            f"generator.sampling.stop={list(strings)} needs the text of tokens, but the model has no "
            "tokenizer"
        )
        yield error(_ENDS, problem, f"{NO_TOKENIZER_FIX}.")
    elif problem := end_ids_problem(config.model.path, stops, strings):
        fix = "Name its end in eos_token_id of generation_config.json, or generator.sampling.stop_token_ids."
        yield warning(_ENDS, problem, fix)
    else:
        ends = [*end_ids_of(config.model.path), *stops, *strings]
        yield ok(_ENDS, f"samples end with {ends}")


def _stop_tokens(config: RunConfig, model: PreTrainedModel) -> Iterator[Finding]:
    known = model.get_input_embeddings().get_parameter("weight").shape[0]
    stops = config.generator.sampling.stop_token_ids
    if problem := stop_ids_problem(stops, known):
        yield error(_ENDS, f"generator.sampling.{problem}", f"{STOP_IDS_FIX}.")


def _vocabulary(config: RunConfig, model: PreTrainedModel) -> Iterator[Finding]:
    """Report token ids that the model can draw but its tokenizer lacks."""
    try:
        tokenizer = load_tokenizer(config)
    except (OSError, ValueError):
        return  # reported by the checks of the files
    ids = model.get_input_embeddings().get_parameter("weight").shape[0]
    if count := TextlessTokens(tokenizer).count(np.arange(ids)):
        yield ok(
            _VOCABULARY,
            f"{count:,} of the model's {ids:,} token ids are not in its tokenizer; "
            "rollout/textless_fraction counts the ones that are drawn",
        )


def _rows(config: RunConfig, model: PreTrainedModel, *, shared_prompt: bool) -> Finding:
    length = config.generator.max_model_len
    try:
        proof = prove_rows(type(model), model.config, length, shared_prompt=shared_prompt)
    except UntrainableModel as refused:
        return error(_ROWS, f"{refused.subject} {refused.problem}", f"{refused.fix}.")
    name = f"{type(model).__name__}, attention {proof.attention}"
    if proof.problem:
        seen = f"{name}: samples cannot share a prompt ({proof.problem}); each gets a separate row"
        return warning(_ROWS, seen, "Set trainer.shared_prompt to false to say so.")
    return ok(_ROWS, f"{name}: as exact as each sample alone")


def _decoding(config: RunConfig, model: PreTrainedModel) -> Finding:
    length = config.generator.max_model_len
    try:
        check_declared(model, length)
        attention = prove_decoding(type(model), model.config, length)
    except UndecodableModel as refused:
        return error(_DECODING, f"{refused.model}: {refused.problem}", f"{refused.fix}.")
    return ok(
        _DECODING, f"{type(model).__name__}, attention {attention}: as exact as each sample alone"
    )


_SUBJECT = "activations"


def check_activations(config: RunConfig, machine: Machine) -> Iterator[Finding]:
    """Estimate the activations of a microbatch of samples of full length, on each rank.

    Yield nothing for other trainers, adapters, models with pictures and other cases that cannot be
    estimated.
    """
    trainer = config.trainer
    if not isinstance(trainer, TorchTrainerConfig):
        return
    found = estimate_activations(config, _full_groups(config, trainer))
    if found is None:
        return
    nbytes, (rows, tokens) = found
    recomputed = str(trainer.activation_checkpointing).lower()
    seen = (
        f"about {size(nbytes)} on each rank in a microbatch of {rows} x {tokens} tokens, samples of full "
        f"length, with trainer.activation_checkpointing={recomputed}"
    )
    if trainer.device == "cpu" and nbytes * trainer_ranks(config) > machine.memory_free_bytes:
        fix = "Lower trainer.max_tokens_per_microbatch, or set trainer.activation_checkpointing to true."
        yield warning(_SUBJECT, f"{seen}; {size(machine.memory_free_bytes)} free", fix)
    else:
        yield ok(_SUBJECT, seen)


def estimate_activations(
    config: RunConfig, groups: Sequence[Columns]
) -> tuple[int, tuple[int, int]] | None:
    """Return the bytes of the largest microbatch of the groups, its rows, and tokens per row.

    Return None for trainers other than torch, adapters, models with pictures, code of a model's
    directory, and models that ``activation_bytes`` cannot count.

    Raises:
        UntrainableModel: No kind of rows is exact for the model.
    """
    trainer = config.trainer
    if not isinstance(trainer, TorchTrainerConfig) or model_is_frozen(config):
        return None
    path, length = Path(config.model.path), config.generator.max_model_len
    if config.model.trust_remote_code:
        return None
    model = model_without_memory(path, trust_remote_code=False)
    if media_rules(model.config).reads_media:
        return None
    proof = prove_kind(type(model), model.config, length, shared_prompt=trainer.shared_prompt)
    dtype = getattr(torch, config.model.dtype)
    return activation_bytes(model.config, groups, trainer, dtype, proof)


def _full_groups(config: RunConfig, trainer: TorchTrainerConfig) -> list[dict[str, np.ndarray]]:
    """Return enough full-length groups of samples to fill a microbatch, or those of one step."""
    length, samples = config.generator.max_model_len, config.samples_per_group
    new = min(config.generator.sampling.max_new_tokens, length - 1)
    prompt = length - new
    in_step = -(-config.groups_per_step // (config.algorithm.minibatches * trainer.data_parallel))
    fill = -(-trainer.max_tokens_per_microbatch // (prompt + samples * new))
    group = {
        "prompt_ids": np.zeros(prompt, np.int32),
        "response_ids": np.zeros(samples * new, np.int32),
        "response_offsets": np.arange(samples + 1, dtype=np.int64) * new,
        "loss_mask": np.ones(samples * new, np.bool_),
    }
    return [group] * max(1, min(in_step, fill))
