"""An engine without a cache: each token is a forward pass over the whole sequence.

Slow, and plain enough to compare others with.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.interfaces import (
    CanaryAnswer,
    EngineUnavailable,
    GenerateRequest,
    GenerateResult,
    InvalidRequest,
    SamplingParams,
)


@dataclass
class _Sample:
    """A sample of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, token: int, logprob: float, version: int) -> None:
        """Append a token that weights of this version have drawn."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))


@dataclass
class _Open:
    """A request that has not finished."""

    request: GenerateRequest
    draw: torch.Generator
    samples: list[_Sample]

    @property
    def unfinished(self) -> list[_Sample]:
        """Return the samples that need another token."""
        return [each for each in self.samples if not each.finish_reason]


class PlainEngine:
    """Draws the tokens of one request after another, one for each sample per step."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        incarnation: str,
        end_ids: Sequence[int],
        max_model_len: int,
        seed: int,
    ) -> None:
        """Serve a model, whose weights may be overwritten between two steps."""
        self.name, self.incarnation, self.model = name, incarnation, model.eval()
        self.tokens, self.busy_s = 0, 0.0
        self._end_ids, self._max_model_len = set(end_ids), max_model_len
        self._seeds = torch.Generator().manual_seed(seed)
        self._open: list[_Open] = []
        self._version, self._lost = 0, ""

    @property
    def running(self) -> int:
        """Return the number of samples that need another token."""
        return len(self._open[0].unfinished) if self._open else 0

    @property
    def waiting(self) -> int:
        """Return the number of requests behind the first."""
        return max(0, len(self._open) - 1)

    @property
    def has_work(self) -> bool:
        """Return whether a request is open."""
        return bool(self._open)

    def set_version(self, version: int) -> None:
        """Stamp tokens with this version."""
        self._version, self._lost = version, ""

    def lose(self, problem: str) -> None:
        """Drop all requests: the weights are of no version."""
        self._open, self._lost = [], problem

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request."""
        if self._lost:
            raise EngineUnavailable(self.name, "generate", self._lost, "Sync it first")
        sampling, id_ = request.sampling, request.request_id
        if sampling.stop or sampling.top_p < 1 or sampling.top_k or sampling.min_p:
            fix = "Leave stop, top_p, top_k and min_p out"
            raise InvalidRequest(id_, "this engine samples by temperature alone", fix)
        if request.media is not None or len(request.prompt_ids) >= self._max_model_len:
            fix = f"Send at most {self._max_model_len - 1} tokens of text"
            raise InvalidRequest(id_, "the prompt has a picture, or leaves no room", fix)
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        draw = torch.Generator().manual_seed(seed % 2**63)
        samples = [_Sample() for _ in range(request.samples)]
        self._open.append(_Open(request, draw, samples))

    def drop(self, request_id: str) -> None:
        """Remove a request."""
        self._open = [each for each in self._open if each.request.request_id != request_id]

    def step(self) -> list[GenerateResult]:
        """Draw one token for each unfinished sample of the first request."""
        began_s = time.perf_counter()
        first = self._open[0]
        for sample in first.unfinished:
            ids = [*first.request.prompt_ids, *sample.token_ids]
            self._draw(first, sample, self._logits(ids))
        self.busy_s += time.perf_counter() - began_s
        if first.unfinished:
            return []
        self._open.pop(0)
        return [self._result(first)]

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[CanaryAnswer]:
        """Return the most probable next token after each prompt."""
        best = [torch.log_softmax(self._logits(prompt), -1).max(-1) for prompt in prompts]
        return [CanaryAnswer(int(each.indices), float(each.values)) for each in best]

    @torch.inference_mode()
    def _logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits of the next token, in float32."""
        out = self.model(input_ids=torch.tensor([token_ids]), use_cache=False)
        return out.logits[0, -1].float()

    def _draw(self, of: _Open, sample: _Sample, logits: Tensor) -> None:
        sampling: SamplingParams = of.request.sampling
        logprobs = torch.log_softmax(logits / sampling.temperature, -1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=of.draw))
        sample.add(token, float(logprobs[token]), self._version)
        self.tokens += 1
        length = len(of.request.prompt_ids) + len(sample.token_ids)
        if token in self._end_ids or token in sampling.stop_token_ids:
            sample.finish_reason = "stop"
        elif len(sample.token_ids) >= sampling.max_new_tokens or length >= self._max_model_len:
            sample.finish_reason = "length"

    def _result(self, done: _Open) -> GenerateResult:
        lengths = [len(each.token_ids) for each in done.samples]
        return GenerateResult(
            request_id=done.request.request_id,
            token_ids=np.concatenate([np.array(s.token_ids, np.int32) for s in done.samples]),
            logprobs=np.concatenate([np.array(s.logprobs, np.float32) for s in done.samples]),
            offsets=np.array([0, *np.cumsum(lengths)], np.int64),
            finish_reasons=tuple(each.finish_reason for each in done.samples),
            version_spans=tuple(tuple(each.spans) for each in done.samples),
            engine=self.name,
            incarnation=self.incarnation,
        )
