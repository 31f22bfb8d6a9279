"""Tracks one generate request from its arrival to its result."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offbeat.generators.end_tokens import STOP_IDS_FIX, stop_ids_problem
from offbeat.generators.stop_strings import StopMatcher
from offbeat.messages.failures import InvalidRequest
from offbeat.messages.generation import (
    LEAST_TEMPERATURE,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)
from offbeat.messages.groups import VersionSpans
from offbeat.models.media_rules import TEXT_ONLY, MediaRules


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of an engine for one request."""

    max_sequences: int
    max_model_len: int
    vocabulary: int
    media_rules: MediaRules = TEXT_ONLY

    def check(self, request: GenerateRequest) -> None:
        """Raise ``InvalidRequest`` unless every setting of the request can be served."""
        for problem, fix in self._problems(request):
            raise InvalidRequest(request.request_id, problem, fix)

    def _problems(self, request: GenerateRequest) -> Iterator[tuple[str, str]]:
        prompt, sampling = request.prompt_ids, request.sampling
        if not prompt:
            yield "the prompt is empty", "Give it at least one token"
        elif len(prompt) >= self.max_model_len:
            yield (
                (
                    f"the prompt has {len(prompt)} tokens and max_model_len={self.max_model_len} "
                    "leaves no room for a new one"
                ),
                "Shorten the prompt or raise generator.max_model_len",
            )
        elif min(prompt) < 0 or max(prompt) >= self.vocabulary:
            outside = next(token for token in prompt if not 0 <= token < self.vocabulary)
            yield (
                (f"prompt token {outside} is outside the vocabulary of {self.vocabulary}"),
                "Tokenize with the tokenizer of the served model",
            )
        else:
            yield from self._media_problems(request)
        if not 1 <= request.samples <= self.max_sequences:
            yield (
                (f"samples={request.samples} is not in 1..{self.max_sequences}"),
                "Ask for fewer samples or raise generator.max_sequences",
            )
        if sampling.max_new_tokens < 1:
            yield f"max_new_tokens={sampling.max_new_tokens}", "Ask for at least one token"
        if problem := stop_ids_problem(sampling.stop_token_ids, self.vocabulary):
            yield problem, STOP_IDS_FIX
        if "" in sampling.stop:
            yield "stop holds an empty string", "Leave it out"
        yield from _distribution_problems(sampling)

    def _media_problems(self, request: GenerateRequest) -> Iterator[tuple[str, str]]:
        if request.media is None:
            return
        if problem := self.media_rules.problem(request.prompt_ids, request.media, is_history=True):
            fix = "Serve a model that reads them, or leave them out"
            if self.media_rules.reads_media:
                fix = f"Make ids and {self.media_rules.noun} with the served model's processor"
            yield f"the prompt {problem}", fix


def _distribution_problems(sampling: SamplingParams) -> Iterator[tuple[str, str]]:
    if not sampling.temperature >= LEAST_TEMPERATURE:
        yield (
            (
                f"temperature={sampling.temperature:g} has no softmax in float32, the least is "
                f"{LEAST_TEMPERATURE:g}"
            ),
            "Use a small positive one, such as 0.01, for almost greedy decoding",
        )
    if not 0 < sampling.top_p <= 1:
        yield f"top_p={sampling.top_p:g} is not in (0, 1]", "Use 1 to keep every token"
    if sampling.top_k < 0:
        yield f"top_k={sampling.top_k} is below 0", "Use 0 to keep every token"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p={sampling.min_p:g} is not in [0, 1]", "Use 0 to keep every token"


@dataclass(slots=True)
class Sample:
    """Result of one finished row."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.floating]
    finish_reason: str
    version_spans: VersionSpans


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Request that the engine has accepted but not yet answered."""

    request: GenerateRequest
    seed: int
    new_tokens: int  # maximum new tokens per sample, also bounded by ``max_model_len``
    samples: dict[int, Sample] = field(default_factory=dict[int, Sample])  # finished, by index
    shift: int = 0  # added to the positions of tokens sampled after media
    matchers: list[StopMatcher] = field(default_factory=list[StopMatcher])  # by sample, or none
    start: int = -1  # tick of the first prompt token, once running
    first_new: int = -1  # tick of the first generated token, once running

    @property
    def unfinished(self) -> int:
        """Number of samples that are not finished."""
        return self.request.samples - len(self.samples)

    @property
    def last_new(self) -> int:
        """Tick at which the longest sample ends."""
        return self.first_new + self.new_tokens - 1

    def start_at(self, now: int) -> None:
        """Place the prompt just before ``now``, the tick of the first generated token."""
        self.start, self.first_new = now - len(self.request.prompt_ids), now

    def result(self, engine: str, incarnation: str) -> GenerateResult:
        """Return the packed answer. All samples must be finished."""
        samples = [self.samples[index] for index in range(self.request.samples)]
        offsets = np.zeros(len(samples) + 1, np.int64)
        np.cumsum([len(sample.token_ids) for sample in samples], out=offsets[1:])
        return GenerateResult(
            request_id=self.request.request_id,
            token_ids=np.concatenate([sample.token_ids for sample in samples]),
            logprobs=np.concatenate([sample.logprobs for sample in samples]),
            offsets=offsets,
            finish_reasons=tuple(sample.finish_reason for sample in samples),
            version_spans=tuple(sample.version_spans for sample in samples),
            engine=engine,
            incarnation=incarnation,
        )
