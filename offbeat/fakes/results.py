"""Results of requests that no model answered: proofs of environments, tests and benchmarks use them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from offbeat.messages.generation import GenerateResult


def make_result(
    request_id: str,
    samples: Sequence[Sequence[int]],
    **facts: Any,  # noqa: ANN401 -- fields of a result
) -> GenerateResult:
    """Return a result that agrees with itself: the token ids of each sample, packed end to end.

    All tokens have one logprob and are of version 0, unless ``facts`` has others.
    """
    ids = [token for sample in samples for token in sample]
    usual: dict[str, Any] = {
        "logprobs": np.full(len(ids), -0.5, np.float32),
        "finish_reasons": ("stop",) * len(samples),
        "version_spans": tuple(((0, len(sample)),) for sample in samples),
        "engine": "engine-0",
        "incarnation": "engine-0-a",
    }
    return GenerateResult(
        request_id=request_id,
        token_ids=np.array(ids, np.int32),
        offsets=np.array([0, *accumulate(map(len, samples))], np.int64),
        **(usual | facts),
    )
