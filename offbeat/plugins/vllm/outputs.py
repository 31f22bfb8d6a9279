"""Converts this package's requests to vLLM's requests, and vLLM's results to this package's.

Legend: G samples of a request, N tokens over all of them.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from offbeat.messages.failures import EngineUnavailable
from offbeat.messages.generation import STOPPED_AT_STRING, GenerateRequest, GenerateResult
from offbeat.messages.groups import VersionSpans

NO_VERSION: Final = "default"
"""vLLM's label for unnamed weights: the ones loaded at start, or a mixture."""

_FINISHED: Final = {"stop": "stop", "length": "length", "repetition": "stop"}


def make_label(version: int) -> str:
    """Return vLLM's label for a weight version."""
    return str(version)


def parse_label(label: str) -> int | None:
    """Return the weight version of vLLM's label, or None for weights that are not of the run."""
    return None if label == NO_VERSION else int(label)


def sampling_arguments(request: GenerateRequest, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``SamplingParams``.

    Sample i draws with seed + i. The seed is hashed first, because the seeds of two groups may be
    neighbours.
    """
    sampling = request.sampling
    seed = None if sampling.seed is None else random.Random(sampling.seed).getrandbits(62)
    return {
        "n": request.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "ignore_eos": True,  # the tokenizer's end can differ from the model's: see ``end_ids``
        "stop_token_ids": [*dict.fromkeys((*end_ids, *sampling.stop_token_ids))],
        "seed": seed,
        "logprobs": 0,  # only of the drawn token
        "flat_logprobs": True,
        # ``include_stop_str_in_output`` stays off. It only changes vLLM's text, which is not read:
        # all tokens are returned. With it, the text of a stop token could complete a stop string.
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,  # a stop string may contain one, because agents see them
        "skip_reading_prefix_cache": False,
    }


def pack_result(
    request: GenerateRequest,
    completions: Sequence[Any],
    engine: str,
    incarnation: str,
    *,
    kv_kept: bool = False,
) -> GenerateResult:
    """Pack the ``CompletionOutput`` of each sample. A sample never started is an empty abort.

    ``kv_kept`` states whether a weight sync keeps the keys and values of the old weights.

    Raises:
        EngineUnavailable: Tokens were drawn by weights that are not of the run.
    """
    samples = sorted(completions, key=lambda completion: completion.index)
    lengths = [len(completion.token_ids) for completion in samples]
    offsets = np.array([0, *accumulate(lengths)], np.int64)
    spans = tuple(_spans(completion) for completion in samples)
    if None in spans:
        problem = "tokens were drawn by weights of no version"
        raise EngineUnavailable(engine, "generate", problem, "Sync it first")
    return GenerateResult(
        request_id=request.request_id,
        token_ids=np.array([id_ for each in samples for id_ in each.token_ids], np.int32),
        logprobs=np.array([p for each in samples for p in each.logprobs.logprobs], np.float32),
        offsets=offsets,
        finish_reasons=tuple(map(_finish_reason, samples)),
        version_spans=tuple(each or () for each in spans),
        engine=engine,
        incarnation=incarnation,
        kept_kv=_after_the_first(spans) if kv_kept else (),
    )


def _finish_reason(completion: Any) -> str:  # noqa: ANN401 - vLLM may not be installed
    if isinstance(completion.stop_reason, str):
        return STOPPED_AT_STRING
    return _FINISHED.get(completion.finish_reason, "abort")


def _after_the_first(spans: Sequence[VersionSpans | None]) -> tuple[int, ...]:
    """Return, per sample, the tokens after its first version, which attended to older keys."""
    later = tuple(sum(count for _, count in (sample or ())[1:]) for sample in spans)
    return later if any(later) else ()


def _spans(completion: Any) -> VersionSpans | None:  # noqa: ANN401 - vLLM may not be installed
    """Return (version, count) runs without equal neighbours, or None if a token has no version."""
    spans = list[tuple[int, int]]()
    for span in completion.weight_versions or ():
        version = parse_label(span.version)
        if version is None:
            return None
        count = span.end - span.start
        if spans and spans[-1][0] == version:
            count += spans.pop()[1]
        if count:
            spans.append((version, count))
    covered = sum(count for _, count in spans)
    return tuple(spans) if covered == len(completion.token_ids) else None
