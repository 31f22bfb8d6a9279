"""Startup proof that an engine's cached passes compute the same as the model's plain forward.

A prompt is prefilled together with a longer prompt, and both are decoded over one cache. Every
log-probability is compared with transformers' plain forward pass. The proof runs twice. The first
time, it uses a tiny model of the same class, and exceeds its attention windows and original
lengths. The second time, it uses the model itself, at the last positions that the training run can
use.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# torch declares some functions without types. Each use of a private name has an explanation.

from collections.abc import Sequence
from typing import Final

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.generators.embedded.cache import ClockedCache
from offbeat.generators.embedded.model import DecodedModel, check_declared
from offbeat.generators.errors import UndecodableModel, advise_another_engine
from offbeat.messages.media import Media
from offbeat.models.loading import freeze_rope
from offbeat.models.media_prompts import RESPONSE_TOKENS, media_prompts
from offbeat.models.plain import (
    HALF,
    TINY_TOLERANCE,
    TOLERANCES,
    WIDENED_TOLERANCE,
    attend_by,
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

# Prompt lengths, and the number of tokens that follow them
_IN_MINIATURE: Final = ((24, 6), LENGTH - 24)
_FAR_TOKENS: Final = 16
_ON_THE_MODEL: Final = ((_FAR_TOKENS - 2, 6), 2)
_SHORTEST: Final = (1,) * 8  # for a model of fewer tokens; 8 prompts give a spread of logprobs

_log = structlog.stdlib.get_logger()
_proofs: dict[tuple[object, ...], str] = {}


def prove_kind(kind: type[PreTrainedModel], config: PreTrainedConfig, max_model_len: int) -> str:
    """Return an attention implementation that decodes models of this class exactly.

    A tiny model proves it. The result depends only on class, config and length.

    Raises:
        UndecodableModel: No implementation decodes the class exactly.
    """
    chosen = config._attn_implementation or "eager"  # noqa: SLF001 -- the only place it is kept
    key = (kind, repr(config.to_dict()), chosen, max_model_len)
    if key not in _proofs:
        with compute_in_one_thread():
            reference = tiny_model(kind, config, max_model_len)
            _proofs[key] = _exact_attention(kind.__name__, reference, chosen)
    return _proofs[key]


def _exact_attention(name: str, reference: PreTrainedModel | None, chosen: str) -> str:
    if reference is None:
        raise UndecodableModel(
            name,
            "no tiny model of it can be made to prove it on",
            advise_another_engine().capitalize(),
        )
    freeze_rope(reference, LENGTH)
    sequences = _random_sequences(*_IN_MINIATURE, reference)
    want = [plain_logprobs(reference, each) for each in sequences]
    problem = ""
    for attention in dict.fromkeys((chosen, "eager")):
        other = with_attention(reference, attention)
        freeze_rope(other, LENGTH)
        try:
            decoded = DecodedModel(other)
            got = _decode_logprobs(decoded, sequences, *_IN_MINIATURE)
        except Exception as error:  # noqa: BLE001 -- a class may refuse a cache with any error
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        worst = distance(got, want).worst
        if worst <= TINY_TOLERANCE:
            return attention
        problem = f"a log-probability is off by {worst:.2g} of their spread"
    raise UndecodableModel(
        name,
        f"decoding differs from its plain forward pass ({problem})",
        advise_another_engine().capitalize(),
    )


def prove_model(decoded: DecodedModel, max_model_len: int, tolerance: float) -> None:
    """Prove decoding on the model itself, at the last positions of ``max_model_len``.

    ``tolerance`` is the maximum mean difference per sequence between decoding and the forward pass.

    Raises:
        UndecodableModel: Decoding and a plain forward pass differ, or the model has no such
            position.
    """
    model, name = decoded.module, type(decoded.module).__name__
    lengths, further = _ON_THE_MODEL
    first = max_model_len - _FAR_TOKENS
    if first < 0:
        lengths, further, first = _SHORTEST, 1, 0
    sequences = _random_sequences(lengths, further, model)
    try:
        with eager_attention(model):
            want = [plain_logprobs(model, each, first) for each in sequences]
    except IndexError as error:
        problem = f"it has no position {max_model_len - 1} ({error})"
        raise UndecodableModel(
            name, problem, f"Lower generator.max_model_len={max_model_len}"
        ) from error
    gap = distance(_decode_logprobs(decoded, sequences, lengths, further, first), want)
    if problem := gap.problem(tolerance):
        problem = f"log-probabilities of decoding, against its plain forward pass, are {problem}"
        raise UndecodableModel(name, problem, advise_another_engine().capitalize())
    attention = model.config._attn_implementation  # noqa: SLF001 -- as above
    dtype = str(decoded.dtype)
    _log.info(
        "model.decoding_proved", model=name, dtype=dtype, attention=attention, **gap._asdict()
    )


def prepare_model(model: PreTrainedModel, max_model_len: int) -> DecodedModel:
    """Fix a model's rotary frequencies and attention, and prove that decoding is exact.

    Raises:
        UndecodableModel: No attention implementation decodes the model exactly.
    """
    check_declared(model, max_model_len)
    attention = prove_kind(type(model), model.config, max_model_len)
    freeze_rope(model, max_model_len)
    if not attend_by(model, attention):
        problem = f"it is exact with attention {attention} only, but cannot be switched to it"
        raise UndecodableModel(type(model).__name__, problem, advise_another_engine().capitalize())
    if model.dtype in HALF:  # whose rounding hides mistakes
        with in_float32(model):
            _prove_both(DecodedModel(model), max_model_len, WIDENED_TOLERANCE)
    decoded = DecodedModel(model)
    _prove_both(decoded, max_model_len, TOLERANCES[model.dtype])
    return decoded


def _prove_both(decoded: DecodedModel, max_model_len: int, tolerance: float) -> None:
    """Prove decoding of text, and of text after media."""
    prove_model(decoded, max_model_len, tolerance)
    prove_media(decoded, max_model_len, tolerance)


def prove_media(decoded: DecodedModel, max_model_len: int, tolerance: float) -> None:
    """Prove decoding after media, if the model reads any.

    Raises:
        UndecodableModel: Decoding and transformers' own pass over ids and media differ.
    """
    model, name = decoded.module, type(decoded.module).__name__
    prompts = media_prompts(model, max_model_len)
    if not prompts:
        return
    sequences = [each.prompt + each.responses[0] for each in prompts]
    media = [each.media for each in prompts]
    with eager_attention(model):
        want = [
            plain_logprobs(model, tokens, media=own)
            for tokens, own in zip(sequences, media, strict=True)
        ]
    lengths = [len(each.prompt) for each in prompts]
    got = _decode_logprobs(decoded, sequences, lengths, RESPONSE_TOKENS, 0, media)
    gap = distance(got, want)
    if problem := gap.problem(tolerance):
        problem = f"log-probabilities of decoding behind {decoded.media_rules.noun} are {problem}"
        raise UndecodableModel(name, problem, advise_another_engine().capitalize())
    _log.info("model.media_proved", model=name, dtype=str(decoded.dtype), **gap._asdict())


def _random_sequences(
    lengths: Sequence[int], further: int, model: PreTrainedModel
) -> list[list[int]]:
    tokens = model.get_input_embeddings().get_parameter("weight").shape[0]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(tokens, (length + further,), generator=generator).tolist()
        for length in lengths
    ]


@torch.inference_mode()
def _decode_logprobs(
    decoded: DecodedModel,
    sequences: Sequence[Sequence[int]],
    lengths: Sequence[int],
    further: int,
    first: int = 0,
    media: Sequence[Media | None] = (),
) -> Tensor:
    """Return log-probabilities [sequence, further] of the last tokens, computed as by an engine.

    Args:
        decoded: The model.
        sequences: Tokens of each prompt, followed by ``further`` tokens.
        lengths: Number of tokens of each prompt.
        further: Number of tokens that are decoded one by one.
        first: Position of the first token of every prompt.
        media: Media of each prompt, or empty.
    """
    device, lengths_B = decoded.module.device, torch.tensor(lengths)
    shifts_B = torch.zeros_like(lengths_B)
    if media:
        shifts_B = torch.tensor([decoded.media_rules.shift(each) for each in media])
    cache = ClockedCache(dtype=decoded.dtype, logprob_dtype=torch.float32, device=device)
    cache.advance()
    prompts = [each[:length] for each, length in zip(sequences, lengths, strict=True)]
    logits_RV, prefilled = decoded.prefill(prompts, lengths_B, first, media)
    cache.append(prefilled, lengths_B, torch.arange(len(lengths), device=device))
    logprobs = list[Tensor]()
    for step in range(further):
        if step:
            positions_R = first + (lengths_B + shifts_B).to(device) + step - 1
            logits_RV = decoded.decode(cache, positions_R)
            cache.advance()
        tokens_R = torch.tensor(
            [each[length + step] for each, length in zip(sequences, lengths, strict=True)],
            device=device,
        )
        each_R = logits_RV.float().log_softmax(-1).gather(1, tokens_R[:, None])[:, 0]
        cache.record(tokens_R, each_R)
        logprobs.append(each_R)
    return torch.stack(logprobs, 1).cpu()
