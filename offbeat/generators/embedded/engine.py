"""Continuous batching over a causal LM. Rows join and leave between two decode steps.

One step decodes one token for every running row, then admits waiting requests. One ragged forward
prefills each admitted prompt once and copies it to its samples. Then one token is drawn for all
rows, old and new, and ended rows are removed.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import itertools
import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.generators.embedded.cache import ClockedCache
from offbeat.generators.embedded.proof import prepare_model
from offbeat.generators.embedded.request import OpenRequest, RequestLimits, Sample
from offbeat.generators.embedded.rows import RunningRows
from offbeat.generators.errors import NO_TOKENIZER_FIX
from offbeat.generators.stop_strings import Decode, StopMatcher
from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from offbeat.messages.generation import STOPPED_AT_STRING, GenerateRequest, GenerateResult
from offbeat.messages.groups import VersionSpans
from offbeat.messages.weights import CanaryAnswer
from offbeat.models.media_canaries import canary_media


class VersionLog:
    """Weight versions of a range of ticks. All rows share the clock, so one log suffices."""

    def __init__(self, version: int) -> None:
        self._since: list[int] = [0]  # ascending ticks
        self._versions: list[int] = [version]

    @property
    def current(self) -> int:
        return self._versions[-1]

    def change(self, tick: int, version: int) -> None:
        """Record that tokens from ``tick`` on have this version. Ticks never decrease."""
        if tick == self._since[-1]:
            self._versions[-1] = version
        else:
            self._since.append(tick)
            self._versions.append(version)

    def forget_before(self, tick: int) -> None:
        """Discard versions that are needed only for ticks before ``tick``."""
        keep = bisect_right(self._since, tick) - 1
        del self._since[:keep], self._versions[:keep]

    def spans(self, first: int, last: int) -> VersionSpans:
        """Return the run lengths of the versions from tick ``first`` to ``last``, both included."""
        at = bisect_right(self._since, first) - 1
        spans: list[tuple[int, int]] = []
        while first <= last:
            following = self._since[at + 1] if at + 1 < len(self._since) else last + 1
            end = min(following, last + 1)
            if spans and spans[-1][0] == self._versions[at]:
                spans[-1] = (spans[-1][0], spans[-1][1] + end - first)
            else:
                spans.append((self._versions[at], end - first))
            first, at = end, at + 1
        return tuple(spans)


_PREFILL_TOKENS = 16_384  # padded tokens in one prefill: bounds its memory
_PATIENCE_STEPS = 4  # steps for which a small prefill waits for more requests
_WORTH_A_PREFILL = 1 / 8  # fraction of the running rows; this many new rows do not wait


class EmbeddedEngine:
    """Continuous-batching engine. It is synchronous, belongs to one thread, and never waits.

    Every drawn token depends only on (seed, sample, position) and the logits. ``deterministic``
    also makes the logits independent of other requests, bit for bit: one request is decoded at a
    time, in a separately laid out cache. A request without a seed gets one from the engine's
    generator, in order of submission. With ``deterministic``, the seed is derived from the
    request's id.

    Logprobs are float32, or float64 for a float64 model.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: PreTrainedModel,
        *,
        name: str,
        incarnation: str,
        eos_token_ids: Sequence[int],
        max_sequences: int,
        max_model_len: int,
        deterministic: bool,
        seed: int,
        device: torch.device | str,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the engine.

        ``decode`` returns the text of tokens. Without ``decode``, stop strings are refused.
        """
        self.name, self.incarnation = name, incarnation
        self.tokens = 0
        """Tokens generated since start."""
        self.busy_s = 0.0
        """Seconds spent in ``step`` since start."""
        nn.Module.to(model, device)  # in place
        self._model = prepare_model(model, max_model_len)
        vocabulary, rules = self._model.vocabulary, self._model.media_rules
        self._limits = RequestLimits(max_sequences, max_model_len, vocabulary, rules)
        self._deterministic = deterministic
        self._seed = seed
        self._seeds = random.Random(seed)
        self._decode = decode
        self._clock = clock
        self._waiting: deque[OpenRequest] = deque()
        self._open: dict[str, OpenRequest] = {}  # waiting and running
        self._running: list[OpenRequest] = []
        self._steps_held = 0  # steps by which the next prefill has been delayed
        self._lost = ""  # reason why the weights have no version; empty if they have one
        self._versions = VersionLog(0)
        self._logprob_dtype = torch.promote_types(self._model.dtype, torch.float32)
        with torch.inference_mode():
            device = torch.device(device)
            self._cache = ClockedCache(
                dtype=self._model.dtype, logprob_dtype=self._logprob_dtype, device=device
            )
            self._rows = RunningRows(max_sequences, eos_token_ids, self._logprob_dtype, device)

    @property
    def model(self) -> PreTrainedModel:
        """Return the model. Its parameters may be overwritten between steps (``set_version``)."""
        return self._model.module

    @property
    def running(self) -> int:
        """Number of samples being decoded."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Number of requests that have not been started."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def version(self) -> int:
        return self._versions.current

    def set_version(self, version: int) -> None:
        """Stamp all tokens drawn from now on with this version of the weights.

        Running rows continue with the keys and values that the older weights computed.
        """
        self._lost = ""
        self._versions.change(self._cache.now + 1, version)

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[CanaryAnswer]:
        """Prefill each canary prompt and return its most probable next token.

        Prompts with placeholders use the canaries' medium. The engine keeps no state from the call.
        """
        lengths_P = torch.tensor([len(prompt) for prompt in prompts])
        media = canary_media(self._model.media_rules, prompts)
        logits_PV, _ = self._model.prefill(prompts, lengths_P, media=media)
        best = torch.log_softmax(logits_PV.to(self._logprob_dtype), -1).max(-1)
        return list(map(CanaryAnswer, best.indices.tolist(), best.values.tolist()))

    def lose(self, problem: str) -> None:
        """Drop open requests and refuse new ones, because the weights have no version.

        The next ``set_version`` ends this state.
        """
        self._lost = problem
        for id_ in list(self._open):
            self.drop(id_)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. ``step`` starts it in order of submission once all its samples fit.

        Raises:
            InvalidRequest: The request can never be served, or its id is already open.
            EngineUnavailable: The engine's weights have no version.
        """
        if self._lost:
            raise EngineUnavailable(self.name, "generate", self._lost, "Sync it first")
        self._limits.check(request)
        if request.request_id in self._open:
            raise InvalidRequest(
                request.request_id, "a request of this id is open", "Use each id once"
            )
        room = self._limits.max_model_len - len(request.prompt_ids)
        new_tokens = min(request.sampling.max_new_tokens, room)
        matchers = self._matchers(request)
        shift = self._model.media_rules.shift(request.media)
        seed = self._pick_seed(request)
        opened = OpenRequest(request, seed, new_tokens, shift=shift, matchers=matchers)
        self._open[request.request_id] = opened
        self._waiting.append(opened)

    @torch.inference_mode()
    def drop(self, request_id: str) -> None:
        """Remove a request and its rows. Do nothing if no such request is open."""
        dropped = self._open.pop(request_id, None)
        if dropped is None:
            return
        self._waiting = deque(each for each in self._waiting if each is not dropped)
        self._running = [each for each in self._running if each is not dropped]
        rows = {row for row, (owner, _) in enumerate(self._rows.owners) if owner is dropped}
        if rows:
            self._compact(rows)

    @torch.inference_mode()
    def step(self) -> list[GenerateResult]:
        """Draw one token for every running row, and the first token of every request that fits.

        Returns:
            The requests that finished in this step, in order of submission. If ``step`` raises, the
                engine is no longer usable.
        """
        began_s = self._clock()
        logits = list[torch.Tensor]()
        if self._rows:
            positions_R = self._rows.rotary_positions(self._cache.now)
            logits.append(self._model.decode(self._cache, positions_R))
        self._cache.advance()
        admitted = self._admit()
        if admitted:
            logits.append(self._prefill(admitted))
        finished = self._draw(torch.cat(logits) if len(logits) > 1 else logits[0]) if logits else []
        self.busy_s += self._clock() - began_s
        return finished

    def _matchers(self, request: GenerateRequest) -> list[StopMatcher]:
        stop, problem = request.sampling.stop, "stop strings need the text of tokens"
        if not stop:
            return []
        if self._decode is None:
            raise InvalidRequest(request.request_id, problem, NO_TOKENIZER_FIX)
        try:
            self._decode(())  # loads the tokenizer
        except (OSError, ValueError) as error:
            problem = f"{problem}, but the model has no tokenizer ({str(error).splitlines()[0]})"
            raise InvalidRequest(request.request_id, problem, NO_TOKENIZER_FIX) from error
        return [StopMatcher(self._decode, stop) for _ in range(request.samples)]

    def _pick_seed(self, request: GenerateRequest) -> int:
        if request.sampling.seed is not None:
            return request.sampling.seed
        if self._deterministic:
            return random.Random(f"{self._seed}/{request.request_id}").getrandbits(64)
        return self._seeds.getrandbits(64)

    # -- parts of a step ---------------------------------------------------------------------------

    def _admit(self) -> list[OpenRequest]:
        """Remove requests that fit from the queue, in order.

        A small batch waits a few steps for more requests. A prefill costs about as much as a decode
        step, even with few rows.
        """
        fitting = self._fitting()
        samples = sum(request.request.samples for request in fitting)
        self._steps_held = self._steps_held + 1 if fitting else 0
        if self._steps_held <= _PATIENCE_STEPS and samples < _WORTH_A_PREFILL * len(self._rows):
            return []
        self._steps_held = 0
        for _ in fitting:
            self._waiting.popleft()
        return fitting

    def _fitting(self) -> list[OpenRequest]:
        """Return the requests at the head of the queue that fit, but only one if deterministic."""
        if self._deterministic:
            return [] if self._rows else list(itertools.islice(self._waiting, 1))
        fitting: list[OpenRequest] = []
        free = self._limits.max_sequences - len(self._rows)
        longest = 0
        for waiting in self._waiting:
            longest = max(longest, len(waiting.request.prompt_ids))
            too_large = longest * (len(fitting) + 1) > _PREFILL_TOKENS
            if waiting.request.samples > free or (fitting and too_large):
                break
            free -= waiting.request.samples
            fitting.append(waiting)
        return fitting

    def _prefill(self, admitted: list[OpenRequest]) -> Tensor:
        """Start requests and return the logits [R, V] of their first tokens, a row per sample."""
        if self._deterministic:
            self._cache.clear()
        prompts = [request.request.prompt_ids for request in admitted]
        lengths_B = torch.tensor([len(prompt) for prompt in prompts])
        samples_B = torch.tensor([request.request.samples for request in admitted])
        media = [request.request.media for request in admitted]
        logits_BV, prefilled = self._model.prefill(prompts, lengths_B, media=media)
        source_R = torch.arange(len(admitted)).repeat_interleave(samples_B).to(logits_BV.device)
        self._cache.append(prefilled, lengths_B, source_R)
        for request in admitted:
            request.start_at(self._cache.now)
        self._running += admitted
        self._rows.append(admitted)
        return logits_BV.index_select(0, source_R)

    def _draw(self, logits_RV: Tensor) -> list[GenerateResult]:
        """Draw one token for every row. Return the requests that are finished by this."""
        now = self._cache.now
        tokens_R, logprobs_R = self._rows.draw(logits_RV, now)
        self._cache.record(tokens_R, logprobs_R)
        self.tokens += len(self._rows)
        ended = dict.fromkeys(self._rows.find_rows_at_limit(now), "length")
        ended |= dict.fromkeys(self._rows_at_a_stop_string(tokens_R), STOPPED_AT_STRING)
        ended |= dict.fromkeys(self._rows.find_stopped(tokens_R), "stop")
        return self._retire(ended)

    def _rows_at_a_stop_string(self, tokens_R: Tensor) -> list[int]:
        if not any(request.matchers for request in self._running):
            return []
        drawn = zip(self._rows.owners, tokens_R.tolist(), strict=True)
        return [
            row
            for row, ((owner, sample), token) in enumerate(drawn)
            if owner.matchers and owner.matchers[sample].push(token)
        ]

    def _retire(self, ended: dict[int, str]) -> list[GenerateResult]:
        """Remove ended rows (row -> finish reason). Return the requests that this completes."""
        if not ended:
            return []
        self._collect(sorted(ended), ended)
        touched = dict.fromkeys(self._rows.owners[row][0] for row in sorted(ended))
        self._running = [request for request in self._running if request.unfinished]
        self._compact(ended)
        finished = [request for request in touched if not request.unfinished]
        if finished and self._running:
            self._versions.forget_before(min(request.first_new for request in self._running))
        for request in finished:
            del self._open[request.request.request_id]
        return [request.result(self.name, self.incarnation) for request in finished]

    def _collect(self, rows: list[int], reasons: dict[int, str]) -> None:
        """Copy the generated tokens of these rows to their requests."""
        owners, now = self._rows.owners, self._cache.now
        since = min(owners[row][0].first_new for row in rows)
        index = torch.tensor(rows, device=self._model.module.device)
        tokens, logprobs = self._cache.history(index, since)
        tokens, logprobs = tokens.to(torch.int32).cpu().numpy(), logprobs.cpu().numpy()
        for at, row in enumerate(rows):
            owner, sample = owners[row]
            first = owner.first_new
            spans = self._versions.spans(first, now)
            own = slice(first - since, None)
            owner.samples[sample] = Sample(tokens[at, own], logprobs[at, own], reasons[row], spans)

    def _compact(self, ended: Collection[int]) -> None:
        """Move the last rows to the places of ended rows."""
        owners = self._rows.owners
        left = len(owners) - len(ended)
        holes = [row for row in ended if row < left]
        movers = [row for row in range(left, len(owners)) if row not in ended]
        for hole, mover in zip(holes, movers, strict=True):
            owners[hole] = owners[mover]
        first = min((request.start for request in self._running), default=self._cache.now)
        device = self._model.module.device
        to, origin = torch.tensor(holes, device=device), torch.tensor(movers, device=device)
        self._rows.keep_only(to, origin, owners[:left])
        self._cache.keep_only(to, origin, left, first)
