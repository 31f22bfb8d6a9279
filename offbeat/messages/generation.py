"""Requests of environment workers to engines, and their results.

Legend: G samples of the request, N generated tokens over all of them.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from offbeat.messages.groups import VersionSpans
from offbeat.messages.media import Media

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


STOPPED_AT_STRING: Final = "stop_string"
"""Finish reason of a sample whose text completed a stop string."""


LEAST_TEMPERATURE: Final = 1e-30
"""Minimum temperature. Below it, scaled logits may exceed float32, so logprobs may be NaN."""


class SamplingParams(msgspec.Struct, frozen=True):
    """Parameters for sampling tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()  # a sample ends with the first of these; it is kept
    seed: int | None = None  # None: the engine's generator draws it
    stop: tuple[str, ...] = ()
    """A sample ends with the first token that completes one of these texts. Every token is kept."""
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0  # 0: all tokens


class GenerateRequest(msgspec.Struct, frozen=True):
    """Request for ``samples`` continuations of one prompt."""

    request_id: str  # unique among the engine's open requests
    prompt_ids: tuple[int, ...]
    samples: int
    sampling: SamplingParams
    media: Media | None = None
    """Pictures of the prompt, sent once per request. The prompt's ids hold placeholder tokens."""


class GenerateResult(msgspec.Struct, frozen=True):
    """Continuations of one request, packed end to end.

    ``logprobs`` are natural logs under ``softmax(logits / temperature)`` over the whole vocabulary,
    before ``min_p``, ``top_k`` and ``top_p`` remove tokens. The trainer computes logprobs under the
    same distribution, and the loss compares the two.
    """

    request_id: str
    token_ids: "NDArray[np.int32]"  # [N]
    logprobs: "NDArray[np.float32]"  # [N]
    offsets: "NDArray[np.int64]"  # [G + 1]; sample i owns [offsets[i], offsets[i + 1])
    finish_reasons: tuple[str, ...]  # [G] stop | stop_string | length | abort
    version_spans: tuple[VersionSpans, ...]  # [G], recorded by the engine
    engine: str
    incarnation: str
    kept_kv: tuple[int, ...] = ()
    """[G] number of each sample's tokens whose keys and values come from older weights.

    Older means older than the token's own version. Empty if no sample has such tokens.
    """
