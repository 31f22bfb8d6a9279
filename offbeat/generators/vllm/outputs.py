"""Between this package's requests and results and vLLM's.

Legend: G samples of a request, N tokens over all of them.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from offbeat.generators.errors import EngineUnavailable
from offbeat.messages.generation import STOPPED_AT_STRING, GenerateRequest, GenerateResult
from offbeat.messages.groups import VersionSpans

NO_VERSION: Final = "default"
"""What vLLM calls weights that nobody named: those it was started with, or a mixture."""

_FINISHED: Final = {"stop": "stop", "length": "length", "repetition": "stop"}


def label_of(version: int) -> str:
    """A weight version as vLLM carries it."""
    return str(version)


def version_of(label: str) -> int | None:
    """A weight version from vLLM's label; None for weights that are not of the run."""
    return None if label == NO_VERSION else int(label)


def sampling_arguments(request: GenerateRequest, end_ids: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``SamplingParams``.

    Sample i draws with seed + i, so the seed is spread first: those of two groups may be
    neighbours.
    """
    asked = request.sampling
    seed = None if asked.seed is None else random.Random(asked.seed).getrandbits(62)
    return {
        "n": request.samples,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "max_tokens": asked.max_new_tokens,
        "ignore_eos": True,  # the tokenizer's end is not the model's: ``end_ids`` says what ends
        "stop_token_ids": [*dict.fromkeys((*end_ids, *asked.stop_token_ids))],
        "seed": seed,
        "logprobs": 0,  # of the drawn token alone
        "flat_logprobs": True,
        "stop": list(asked.stop),
        "detokenize": bool(asked.stop),
        "skip_reading_prefix_cache": False,
    }


def result_of(
    request: GenerateRequest,
    completions: Sequence[Any],
    engine: str,
    incarnation: str,
    *,
    kv_kept: bool = False,
) -> GenerateResult:
    """The ``CompletionOutput`` of each sample, packed. A sample never started is an empty abort.

    ``kv_kept``: a weight sync leaves keys and values as the old weights made them.

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
    """Return per sample the tokens after its first version: all of them attended to older keys."""
    later = tuple(sum(count for _, count in (sample or ())[1:]) for sample in spans)
    return later if any(later) else ()


def _spans(completion: Any) -> VersionSpans | None:  # noqa: ANN401 - vLLM may not be installed
    """Versions and counts, neighbours of one version joined; None when one has no version."""
    spans = list[tuple[int, int]]()
    for span in completion.weight_versions or ():
        version = version_of(span.version)
        if version is None:
            return None
        count = span.end - span.start
        if spans and spans[-1][0] == version:
            count += spans.pop()[1]
        if count:
            spans.append((version, count))
    covered = sum(count for _, count in spans)
    return tuple(spans) if covered == len(completion.token_ids) else None
