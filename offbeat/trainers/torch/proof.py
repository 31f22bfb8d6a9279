"""Startup proof that packed rows give the same results as each sample by itself.

A row contains several samples after one copy of their prompt, or one sample and padding (in a
microbatch with longer rows), or several groups end to end. A model's name or config does not tell
whether the model computes such rows correctly. So these kinds of rows are compared with
transformers' plain forward pass, on a tiny model of the class and on the model itself. The same is
done for rows with media.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.
# torch declares some functions without types. Private names are explained where they are used.

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.models.loading import freeze_rope
from offbeat.models.media_passes import FeaturesOf
from offbeat.models.media_prompts import MediaPrompt, media_prompts
from offbeat.models.media_rules import media_rules
from offbeat.models.plain import (
    HALF,
    TINY_TOLERANCE,
    TOLERANCES,
    WIDENED_TOLERANCE,
    Distance,
    attend_by,
    check_last_position,
    distance,
    eager_attention,
    in_float32,
    plain_logprobs,
)
from offbeat.models.tiny_model import (
    LENGTH,
    compute_in_one_thread,
    tiny_model,
    with_attention,
)
from offbeat.trainers.batches.packing import Batch, PackedRows, flatten, pack
from offbeat.trainers.batches.planner import plan_rows
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.forward import compute_packed_logprobs, has_plain_head
from offbeat.trainers.torch.model import vocabulary
from offbeat.trainers.torch.sharding import class_name
from offbeat.trainers.torch.split_attention import SPLIT, register_split_attention
from offbeat.transfer_queue.schema import PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, Columns

_WIDEST: Final = 1 << 30  # one row for all samples of a group
_log = structlog.stdlib.get_logger()


@torch.no_grad()
def prove_media(
    model: PreTrainedModel,
    max_model_len: int,
    dtype: torch.dtype,
    tolerance: float,
    *,
    share: bool,
    split: bool,
) -> None:
    """Prove rows of groups with media on the model itself, if it reads media.

    Args:
        model: The whole model on its device.
        max_model_len: Tokens of the longest sequence of the run.
        dtype: Dtype of the computation.
        tolerance: Largest mean distance of a sample.
        share: Whether samples share one copy of their prompt.
        split: Whether rows are laid end to end.

    Raises:
        UntrainableModel: A sample's logprobs differ from transformers' own pass over its ids and
            media.
    """
    prompts = media_prompts(model, max_model_len)
    if not prompts:
        return
    with eager_attention(model):
        want = [
            plain_logprobs(model, each.prompt + response, media=each.media)[-len(response) :]
            for each in prompts
            for response in each.responses
        ]
    rules = media_rules(model.config)
    groups = [_columns(each) for each in prompts]
    batch = flatten(groups, only_trained=False, vocabulary=vocabulary(model), media_rules=rules)
    firsts = [0] * len(prompts)
    samples = in_rows(model, batch, firsts, share=share, split=split, dtype=dtype).values()
    gap, name = distance(samples, want), type(model).__name__
    if problem := gap.problem(tolerance):
        problem = f"computes log-probabilities behind {rules.noun} that are {problem}"
        raise UntrainableModel(name, problem, f"Train another model, or leave {rules.noun} out")
    _log.info("model.media_proved", model=name, dtype=str(dtype), **gap._asdict())


def _columns(each: MediaPrompt) -> Columns:
    tokens = [len(response) for response in each.responses]
    return {
        PROMPT_IDS: np.array(each.prompt, np.int32),
        RESPONSE_IDS: np.concatenate(each.responses).astype(np.int32),
        RESPONSE_OFFSETS: np.cumsum([0, *tokens]),
        **each.media,
    }


@torch.no_grad()
def in_rows(
    model: PreTrainedModel,
    batch: Batch,
    firsts: Sequence[int],
    *,
    share: bool,
    split: bool,
    dtype: torch.dtype = torch.float32,
    features_of: FeaturesOf | None = None,
) -> dict[int, Tensor]:
    """Return log-probabilities of all responses, computed in one microbatch like a trainer."""
    packed = pack_in_one(batch, firsts, share=share, split=split)
    logprobs = torch.empty(len(batch.tokens), dtype=torch.float32)
    got_N = compute_packed_logprobs(model, packed, 1.0, dtype, features_of=features_of)
    logprobs[torch.from_numpy(packed.source_N)] = got_N.float().cpu()
    return dict(enumerate(logprobs.split(batch.length_S.tolist())))


def pack_in_one(batch: Batch, firsts: Sequence[int], *, share: bool, split: bool) -> PackedRows:
    """Return the rows of a batch in one microbatch, with their prompts at these positions."""
    rows = plan_rows(batch, response_tokens=_WIDEST if share else 0, max_tokens=_WIDEST)
    packed = pack(batch, rows, flat=split)
    first_R = np.array([firsts[row.group] for row in rows])
    shift = np.repeat(first_R, [row.length for row in rows])[None] if split else first_R[:, None]
    return replace(packed, positions_RT=packed.positions_RT + shift)


FAR_TOKENS: Final = 16
"""Length of the row whose last token has the last position that the run can use."""

_Sizes = Sequence[tuple[int, Sequence[int]]]
_IN_MINIATURE: Final[_Sizes] = [(8, (LENGTH - 8, 25, 3)), (20, (LENGTH - 20, 5))]
_NEAR: Final = (4, (6, 6))
_FAR: Final = (6, (FAR_TOKENS - 6,))
_SDPA: Final = "sdpa"
_FROM_THE_START: Final = (0, 0)


@dataclass(frozen=True, slots=True)
class RowProof:
    """Settings under which packed rows are exact for a model."""

    attention: str  # attention implementation; SPLIT: flat rows are exact, too
    shared_prompt: bool  # whether samples may share one copy of their prompt
    problem: str = ""  # why they may not, if requested
    plain_head: bool = False  # whether the head's output are the logits

    @property
    def split(self) -> bool:
        """Return whether rows may be flat, with attention computed segment by segment."""
        return self.attention == SPLIT


@dataclass(frozen=True, slots=True)
class Witness:
    """Reference logprobs of some rows.

    The rows themselves are derived from the vocabulary and other fields.
    """

    max_model_len: int
    share: bool
    split: bool
    logprobs: dict[int, list[float]]  # logprobs by sample

    def rows(self, model: PreTrainedModel) -> tuple[Batch, Sequence[int]]:
        """Return the rows, and the position of the first token of each group's prompt."""
        sizes = [_NEAR, _FAR] if self.max_model_len >= FAR_TOKENS else [_NEAR]
        firsts = [0, self.max_model_len - FAR_TOKENS if self.share else 0]
        return _random_batch(sizes, vocabulary(model)), firsts

    def pack_witness(self, model: PreTrainedModel) -> PackedRows:
        """Return the rows in one microbatch."""
        return pack_in_one(*self.rows(model), share=self.share, split=self.split)


_proofs: dict[tuple[object, ...], RowProof] = {}


def prove_rows(
    model: PreTrainedModel, max_model_len: int, *, shared_prompt: bool, dtype: torch.dtype
) -> tuple[RowProof, Witness]:
    """Prove rows of a loaded model, and select an attention implementation that is exact.

    Args:
        model: The whole model on its device, with fixed rotary frequencies.
        max_model_len: Tokens of the longest sequence of the run.
        shared_prompt: Whether samples should share a prompt if that is exact.
        dtype: Dtype of the computation.

    Raises:
        UntrainableModel: No kind of rows is exact.
    """
    kind = type(model)
    proof = prove_kind(kind, model.config, max_model_len, shared_prompt=shared_prompt)
    while True:
        if proof.problem:
            _log.warning("model.prompts_not_shared", model=kind.__name__, problem=proof.problem)
        try:
            return _prove(model, max_model_len, proof, dtype)
        except (UntrainableModel, RuntimeError) as error:  # a device's kernels refuse in their way
            reason = str(error).partition("\n")[0]
            if proof.split:
                _log.warning("model.attention_not_split", model=kind.__name__, problem=reason)
                proof = replace(proof, attention=_SDPA)
            elif proof.shared_prompt:
                proof = replace(proof, shared_prompt=False, problem=reason)
            else:
                raise


def _prove(
    model: PreTrainedModel, max_model_len: int, proof: RowProof, dtype: torch.dtype
) -> tuple[RowProof, Witness]:
    if not attend_by(model, proof.attention):
        problem = f"is exact with attention {proof.attention} only, and cannot be switched to it"
        raise UntrainableModel(type(model).__name__, problem, "Train another model")
    if dtype in HALF:  # rounding hides mistakes
        with in_float32(model):
            _prove_both(model, max_model_len, proof, torch.float32, WIDENED_TOLERANCE)
    return proof, _prove_both(model, max_model_len, proof, dtype, TOLERANCES[dtype])


def _prove_both(
    model: PreTrainedModel,
    max_model_len: int,
    proof: RowProof,
    dtype: torch.dtype,
    tolerance: float,
) -> Witness:
    """Prove rows of text and rows with media."""
    witness = prove_model(model, max_model_len, proof, dtype, tolerance)
    share, split = proof.shared_prompt, proof.split
    prove_media(model, max_model_len, dtype, tolerance, share=share, split=split)
    return witness


def prove_kind(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    max_model_len: int,
    *,
    shared_prompt: bool,
) -> RowProof:
    """Prove rows on a tiny model of the class. The result depends only on the arguments.

    Raises:
        UntrainableModel: Even a row of one sample and padding gives different results from the
            sample alone.
    """
    chosen = config._attn_implementation or "sdpa"  # noqa: SLF001 -- the only place with it
    key = (kind, repr(config.to_dict()), chosen, max_model_len, shared_prompt)
    if key not in _proofs:
        with compute_in_one_thread():
            reference = tiny_model(kind, config, max_model_len)
            _proofs[key] = _prove_kind(kind, reference, chosen, shared_prompt=shared_prompt)
    return _proofs[key]


def _prove_kind(
    kind: type[PreTrainedModel],
    reference: PreTrainedModel | None,
    chosen: str,
    *,
    shared_prompt: bool,
) -> RowProof:
    if reference is None:
        raise UntrainableModel(
            kind.__name__,
            "has no tiny model that its rows could be proved on",
            "Train another model",
        )
    freeze_rope(reference, LENGTH)
    batch = _random_batch(_IN_MINIATURE, vocabulary(reference))
    want = _alone(reference, batch, range(len(batch.start_S)), _FROM_THE_START)
    problem = ""
    for attention in dict.fromkeys((chosen, "eager")):
        model = with_attention(reference, attention)
        freeze_rope(model, LENGTH)
        exact, problem = _compare(model, batch, want, share=False)
        if exact:
            break
    else:
        raise UntrainableModel(
            kind.__name__,
            f"computes a sample differently next to a longer one than by itself ({problem})",
            "Train another model",
        )
    problem = ""
    if shared_prompt:
        shared_prompt, problem = _compare(model, batch, want, share=True)
    if attention == _SDPA and _splits(reference, batch, want, share=shared_prompt):
        attention = SPLIT
    return RowProof(
        attention, shared_prompt, "" if shared_prompt else problem, has_plain_head(model)
    )


def _splits(
    reference: PreTrainedModel, batch: Batch, want: dict[int, Tensor], *, share: bool
) -> bool:
    """Return whether flat rows of all groups are exact for a class."""
    register_split_attention()
    try:
        model = with_attention(reference, SPLIT)
    except KeyError as error:  # a class that looks attention up in a table of its own
        _log.debug("model.attention_not_split", model=type(reference).__name__, problem=repr(error))
        return False
    freeze_rope(model, LENGTH)
    return _compare(model, batch, want, share=share, split=True)[0]


def _compare(
    model: PreTrainedModel,
    batch: Batch,
    want: dict[int, Tensor],
    *,
    share: bool,
    split: bool = False,
) -> tuple[bool, str]:
    """Return whether a tiny model's rows match the reference, and a description."""
    try:
        got = in_rows(model, batch, _FROM_THE_START, share=share, split=split)
    except Exception as error:  # noqa: BLE001 -- a class may refuse masks and positions
        return False, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    worst = _distance(got, want).worst
    return worst <= TINY_TOLERANCE, f"a log-probability is off by {worst:.2g} of their spread"


def prove_model(
    model: PreTrainedModel,
    max_model_len: int,
    proof: RowProof,
    dtype: torch.dtype,
    tolerance: float,
) -> Witness:
    """Prove rows on the model itself, including the last positions of ``max_model_len``.

    Args:
        model: The whole model on its device.
        max_model_len: Tokens of the longest sequence of the run.
        proof: Kind of rows.
        dtype: Dtype of the computation.
        tolerance: Largest mean distance of a sample.

    Raises:
        UntrainableModel: A sample has different results in a row and alone, or the model lacks such
            a position.
    """
    name = type(model).__name__
    witness = Witness(max_model_len, proof.shared_prompt, proof.split, {})
    batch, firsts = witness.rows(model)
    groups = range(int(batch.group_S.max()) + 1)
    samples = [int(np.flatnonzero(batch.group_S == group)[-1]) for group in groups]
    try:
        with eager_attention(model):
            want = _alone(model, batch, samples, firsts)
            if not proof.shared_prompt:
                check_last_position(model, max_model_len)
    except IndexError as error:
        raise UntrainableModel(
            name,
            f"has no position {max_model_len - 1} ({error})",
            f"Lower generator.max_model_len={max_model_len}",
        ) from error
    got = in_rows(model, batch, firsts, share=proof.shared_prompt, split=proof.split, dtype=dtype)
    gap = _distance(got, want)
    if problem := gap.problem(tolerance):
        raise UntrainableModel(
            name,
            f"computes log-probabilities in rows that are {problem}",
            "Set trainer.shared_prompt to false" if proof.shared_prompt else "Train another model",
        )
    _log.info("model.rows_proved", model=name, dtype=str(dtype), **gap._asdict(), **asdict(proof))
    return replace(witness, logprobs={sample: each.tolist() for sample, each in got.items()})


def prove_sharding(
    model: PreTrainedModel,
    witness: Witness,
    dtype: torch.dtype,
    features_of: FeaturesOf | None = None,
) -> None:
    """Prove that a sharded model computes the same results as the whole model.

    All ranks must call it together. ``features_of`` is set if the ranks hold no vision tower. These
    rows do not need one.

    Raises:
        UntrainableModel: The results differ.
    """
    batch, firsts = witness.rows(model)
    got = in_rows(
        model,
        batch,
        firsts,
        share=witness.share,
        split=witness.split,
        dtype=dtype,
        features_of=features_of,
    )
    want = {
        sample: torch.tensor(each, dtype=torch.float32) for sample, each in witness.logprobs.items()
    }
    if problem := _distance(got, want).problem(TOLERANCES[dtype]):
        raise UntrainableModel(
            class_name(model),
            f"computes log-probabilities when it is cut over ranks that are {problem}",
            "Set trainer.data_parallel and trainer.tensor_parallel to 1",
        )


def _random_batch(sizes: _Sizes, tokens: int) -> Batch:
    rng = np.random.default_rng(0)
    groups: list[Columns] = [
        {
            PROMPT_IDS: rng.integers(tokens, size=prompt, dtype=np.int32),
            RESPONSE_IDS: rng.integers(tokens, size=sum(lengths), dtype=np.int32),
            RESPONSE_OFFSETS: np.cumsum([0, *lengths]),
        }
        for prompt, lengths in sizes
    ]
    return flatten(groups, only_trained=False, vocabulary=tokens)


def _alone(
    model: PreTrainedModel, batch: Batch, samples: Sequence[int], firsts: Sequence[int]
) -> dict[int, Tensor]:
    """Return log-probabilities of the responses, each sample alone in a plain forward pass.

    Args:
        model: Model with its attention configured.
        batch: Batch with the samples.
        samples: Indices of the samples.
        firsts: Position of the first token of each group's prompt.
    """
    want = dict[int, Tensor]()
    for sample in samples:
        group, start = int(batch.group_S[sample]), int(batch.start_S[sample])
        prompt = batch.prompts[group].tolist()
        response = batch.tokens[start : start + int(batch.length_S[sample])].tolist()
        logprobs = plain_logprobs(model, prompt + response, firsts[group])
        want[sample] = logprobs[len(prompt) - 1 :].cpu()
    return want


def _distance(got: dict[int, Tensor], want: dict[int, Tensor]) -> Distance:
    return distance([got[sample] for sample in want], want.values())
