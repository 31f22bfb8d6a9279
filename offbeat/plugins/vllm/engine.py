"""Serves requests with vLLM's ``AsyncLLM``, behind a gate that weight syncs close.

waiter         waits for                      woken by
a request      the gate                       the end of a weight sync, good or bad
a request      its answer                     vLLM's output handler
``state``      nothing: the next call finds a heartbeat that was not answered in time

Converts prompts, with pictures or without, to vLLM's inputs. Depends on the option ``images``.

vLLM usually gets a picture file and one placeholder token, runs the image processor itself and
expands the placeholder. A request already contains both results. The pixel values go to the model
unchanged, so engine and trainer compute from the same numbers. The token ids are the group's.

Legend: I pictures, C channels, H height, W width, K placeholder tokens of a picture.
"""

# pyright: basic
# vLLM may not be installed.

import asyncio
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from offbeat.generators.embedded.request import RequestLimits
from offbeat.generators.errors import NO_TOKENIZER_FIX
from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.media import Media
from offbeat.messages.weights import CanaryAnswer
from offbeat.models.media_canaries import canary_media
from offbeat.models.media_rules import MediaRules
from offbeat.plugins.images.pictures import Pictures
from offbeat.plugins.vllm.lazy_import import Library
from offbeat.plugins.vllm.outputs import make_label, pack_result, sampling_arguments
from offbeat.plugins.vllm.section import VllmConfig

_MODALITY = "image"


class PromptInputs:
    """Builder of the inputs of one engine."""

    def __init__(self, library: Library, rules: MediaRules) -> None:
        """``rules``: media rules of the served model."""
        self._vllm, self._rules = library, rules

    def of(self, prompt_ids: Sequence[int], media: Media | None, salt: str) -> Any:  # noqa: ANN401
        """Return the input of a prompt.

        Args:
            prompt_ids: Token ids, with the placeholder tokens of each picture.
            media: The pictures, checked against the rules of the model.
            salt: Only prompts with the same salt read the cached values of this prompt.
        """
        ids = list(prompt_ids)
        if media is None:
            return self._vllm.TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
        return self._vllm.mm_input(
            ids,
            self._values(Pictures.of(media)),
            {_MODALITY: _names(Pictures.of(media), salt)},
            {_MODALITY: self._ranges(ids, media)},
            cache_salt=salt,
        )

    def _values(self, pictures: Pictures) -> Any:  # noqa: ANN401
        """Return the arguments of the model's vision tower: each picture is an item of one tile."""
        # A process that only has a handle of the actor need not load torch and transformers.
        import torch
        from transformers import BatchFeature

        count = len(pictures.sizes)
        each = torch.ones(count, dtype=torch.long)
        pixels_ICHW = torch.tensor(pictures.values).reshape(count, *pictures.sizes[0].tolist())
        of_tiles = self._vllm.MultiModalFieldConfig.flat_from_sizes(_MODALITY, each)
        tower = {
            "pixel_values": pixels_ICHW,
            "pixel_attention_mask": torch.ones_like(pixels_ICHW[:, 0], dtype=torch.bool),
            "num_patches": each,
        }
        fields = {
            "pixel_values": of_tiles,
            "pixel_attention_mask": of_tiles,
            "num_patches": self._vllm.MultiModalFieldConfig.batched(_MODALITY, keep_on_cpu=True),
        }
        return self._vllm.MultiModalKwargsItems.from_hf_inputs(BatchFeature(tower), fields)

    def _ranges(self, ids: list[int], media: Media) -> list[Any]:
        """Return the places of each picture's features; gaps between its placeholders are kept."""
        import torch

        ranges = list[Any]()
        for places_K in self._rules.places(ids, media).reshape(len(Pictures.of(media).sizes), -1):
            taken = torch.zeros(int(places_K[-1] - places_K[0]) + 1, dtype=torch.bool)
            taken[torch.from_numpy(places_K - places_K[0])] = True
            ranges.append(self._vllm.PlaceholderRange(int(places_K[0]), len(taken), taken))
        return ranges


def _names(pictures: Pictures, salt: str) -> list[str]:
    """Return the names under which vLLM caches the features of each picture.

    The names contain the salt, so features of older weights are never read.
    """
    rows = pictures.values.reshape(len(pictures.sizes), -1)
    digests = [hashlib.blake2b(each.tobytes(), digest_size=16).hexdigest() for each in rows]
    return [f"{salt}.{digest}" for digest in digests]


T = TypeVar("T")
_WARM_UP_TOKENS: Final = 3
_FIRST: Final = -1  # a priority: samples have 0
_DIED: Final = "the engine core has died"


@dataclass(slots=True, eq=False)
class _Open:
    """An unanswered request. ``fate`` determines how an abort by vLLM is handled."""

    samples: int
    fate: Literal["aborted", "again", "lost"] = "aborted"


class VllmEngine:
    """One ``AsyncLLM``. All methods belong to the event loop of the first call.

    It serves after ``serve``. After ``lose`` its weights are of no version. It then stays paused,
    and every request raises ``EngineUnavailable`` until the next ``serve``.
    """

    def __init__(
        self,
        library: Library,
        llm: Any,  # noqa: ANN401 - vLLM may not be installed
        *,
        name: str,
        incarnation: str,
        end_ids: Sequence[int],
        limits: RequestLimits,
        config: VllmConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.incarnation, self.llm = name, incarnation, llm
        self.tokens = 0
        """Tokens generated since start."""
        self._vllm, self._end_ids, self._limits, self._clock = library, end_ids, limits, clock
        self._inputs = PromptInputs(library, limits.media_rules)
        self._heartbeat_deadline_s = config.heartbeat_deadline_s
        self._kv_kept = config.kv == "keep"
        self._open: dict[str, _Open] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._salt, self._canaries = "", itertools.count()
        self._not_serving = "it holds no weights of this run"
        self._gone = ""  # reason why it will never serve again; empty if it can
        self._busy_s, self._busy_since = 0.0, 0.0
        self._heartbeat: asyncio.Future[str] | None = None
        self._heartbeat_since = 0.0

    # --- its state --------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of samples requested and not answered."""
        return sum(each.samples for each in self._open.values())

    @property
    def waiting(self) -> int:
        """Always 0: vLLM does not report which requests it has started."""
        return 0

    @property
    def busy_s(self) -> float:
        """Seconds since start in which a request could be decoded, pauses excluded."""
        return self._busy_s + (self._clock() - self._busy_since if self._is_busy else 0.0)

    @property
    def serving(self) -> bool:
        return not self._not_serving

    def check_usable(self, during: str) -> None:
        """Raise unless the engine's processes live and answer.

        Raises:
            EngineUnavailable: They have ended, hang, or were declared dead.
        """
        if not self._gone and self.llm.errored:
            self._gone = _DIED
        if not self._gone:
            self._gone = self._heartbeat_problem()
        self.check_not_gone(during)

    def check_not_gone(self, during: str) -> None:
        """Raise if the engine is already known to be gone.

        Raises:
            EngineUnavailable: Its processes have ended, hang, or were declared dead.
        """
        if self._gone:
            raise EngineUnavailable(self.name, during, self._gone, "Start another engine")

    async def await_answer(self, during: str, reply: Awaitable[T]) -> T:
        """Await a reply of the engine core, or raise when the core dies.

        vLLM never answers a call to a dead core. It ends its output handler and the requests that
        wait for tokens, but not this call.

        Raises:
            EngineUnavailable: The core has died.
        """
        call, core_lives = asyncio.ensure_future(reply), self.llm.output_handler
        try:
            await asyncio.wait((call, core_lives), return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
        except self._vllm.EngineDeadError:
            pass  # as below
        finally:
            call.cancel()
        self._gone = self._gone or _DIED
        raise EngineUnavailable(self.name, during, self._gone, "Start another engine")

    # --- requests ---------------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """Run a first request, which compiles code for later ones and proves that tokens come out.

        The tokens are of no version and are discarded.
        """
        params = self._params(n=1, max_tokens=_WARM_UP_TOKENS, detokenize=False, logprobs=0)
        await self._final(self._inputs.of([0, 0], None, "warm-up"), params, "warm-up")

    async def greedy(self, prompts: Sequence[Sequence[int]]) -> list[CanaryAnswer]:
        """Return the most probable next token after each prompt under the current weights.

        The calls bypass the gate and run ahead of waiting samples. They do not read the prefix
        cache, which may hold keys of different weights.
        """
        params = self._params(
            n=1,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
        )
        ids = [f"canary-{next(self._canaries)}" for _ in prompts]
        replies = await asyncio.gather(
            *(
                self._final(self._inputs.of(prompt, media, id_), params, id_, _FIRST)
                for prompt, media, id_ in zip(
                    prompts, canary_media(self._limits.media_rules, prompts), ids, strict=True
                )
            )
        )
        return [
            CanaryAnswer(int(each.token_ids[0]), float(each.logprobs.logprobs[0]))
            for (each,) in replies
        ]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the finished samples of a request. Cancelling the call removes it from the engine.

        A request waits during the swap of a sync. With ``pause: abort``, running requests are
        restarted.

        Raises:
            InvalidRequest: The engine can never serve it, or an open request has the same id.
            EngineUnavailable: Its weights are of no version, or its processes have ended.
        """
        self._limits.check(request)
        self._check_text(request)
        id_ = request.request_id
        if id_ in self._open:
            raise InvalidRequest(id_, "a request of this id is open", "Use each id once")
        self._account()
        opened = self._open[id_] = _Open(request.samples)
        self._account()
        try:
            result = await self._generate(request, opened)
        finally:
            self._account()
            del self._open[id_]
            self._account()
        self.tokens += len(result.token_ids)
        return result

    async def _generate(self, request: GenerateRequest, opened: _Open) -> GenerateResult:
        while True:
            await self._gate.wait()
            self.check_usable("generate")
            self._check_serving()
            opened.fate = "aborted"
            completions = await self._completions(request)
            # A sample that ends before the canary passes is answered only afterwards
            await self._gate.wait()
            fate = self._open[request.request_id].fate  # other tasks set it meanwhile
            if fate == "lost":
                self._check_serving()
                problem = "a weight sync into it failed while this ran"
                raise EngineUnavailable(self.name, "generate", problem, "Ask another engine")
            was_aborted = any(each.finish_reason == "abort" for each in completions)
            if fate == "again" and was_aborted:
                continue
            return pack_result(
                request, completions, self.name, self.incarnation, kv_kept=self._kv_kept
            )

    async def _completions(self, request: GenerateRequest) -> Sequence[Any]:
        id_ = request.request_id
        arguments = sampling_arguments(request, self._end_ids)
        room = self._limits.max_model_len - len(request.prompt_ids)
        arguments["max_tokens"] = min(arguments["max_tokens"], room)
        try:
            prompt = self._inputs.of(request.prompt_ids, request.media, self._salt)
            return await self._final(prompt, self._params(**arguments), id_)
        except (self._vllm.VLLMClientError, ValueError) as error:
            raise InvalidRequest(id_, str(error), "Change the request or the recipe") from error

    async def _final(
        self,
        prompt: Any,  # noqa: ANN401 - vLLM may not be installed
        params: Any,  # noqa: ANN401
        id_: str,
        priority: int = 0,
    ) -> Sequence[Any]:
        last = None
        try:
            async for output in self.llm.generate(
                prompt, params, request_id=id_, priority=priority
            ):
                last = output
        except (self._vllm.EngineDeadError, self._vllm.EngineGenerateError) as error:
            problem = f"vLLM raised {error.__cause__ or error!r}"
            fix = "Start another engine"
            raise EngineUnavailable(self.name, "generate", problem, fix) from error
        return last.outputs if last is not None else ()

    def _params(self, **arguments: Any) -> Any:  # noqa: ANN401 - vLLM may not be installed
        final_only = self._vllm.RequestOutputKind.FINAL_ONLY
        return self._vllm.SamplingParams(**arguments, output_kind=final_only)

    # --- for weight syncs -------------------------------------------------------------------------

    def close_gate(self, *, start_anew: bool) -> None:
        """Make new requests wait.

        With ``start_anew``, requests that vLLM aborts from now on are restarted.
        """
        self._account()
        self._gate.clear()
        if start_anew:
            for opened in self._open.values():
                opened.fate = "again"

    def open_gate(self) -> None:
        """Release waiting requests. They continue, or fail if the engine has no version."""
        self._account()
        self._gate.set()

    def serve(self, version: int, epoch: int) -> None:
        """Stamp tokens with this version.

        Each epoch has its own prefix cache, even if a version returns.
        """
        self._salt, self._not_serving = f"{make_label(version)}.{epoch}", ""

    async def lose(self, problem: str) -> None:
        """Mark the weights as of no version, end running requests and refuse new ones."""
        self._not_serving = problem
        for opened in self._open.values():
            opened.fate = "lost"
        self.open_gate()
        await self.llm.abort(list(self._open))

    def give_up(self, problem: str) -> None:
        """Declare the engine dead, because it cannot recover."""
        self._gone = problem

    async def close(self) -> None:
        """End the engine's processes. Open requests raise ``EngineUnavailable``."""
        self._gone = self._gone or "it was closed"
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        await self.lose("it was closed")
        await asyncio.to_thread(self.llm.shutdown)

    # --- inside -----------------------------------------------------------------------------------

    def _check_text(self, request: GenerateRequest) -> None:
        """Refuse stop strings without a tokenizer, because vLLM would ignore them silently."""
        if request.sampling.stop and self.llm.tokenizer is None:
            problem = "stop strings need the text of tokens, but the model has no tokenizer"
            raise InvalidRequest(request.request_id, problem, NO_TOKENIZER_FIX)

    def _check_serving(self) -> None:
        if self._not_serving:
            raise EngineUnavailable(self.name, "generate", self._not_serving, "Sync it first")

    @property
    def _is_busy(self) -> bool:
        return bool(self._open) and self._gate.is_set()

    def _account(self) -> None:
        """Add the time up to now to the busy time, if the engine is busy.

        Call it before and after each change that affects whether the engine is busy.
        """
        now = self._clock()
        if self._is_busy:
            self._busy_s += now - self._busy_since
        self._busy_since = now

    def _heartbeat_problem(self) -> str:
        """Return why the last heartbeat failed or is late, else an empty string. Send one if due."""
        beat, deadline_s = self._heartbeat, self._heartbeat_deadline_s
        if beat is not None and not beat.done():
            overdue = self._clock() - self._heartbeat_since > deadline_s
            waits = not self._gate.is_set()  # for a sync, whose calls have their own deadlines
            hung = overdue and not waits
            return f"the engine core answered nothing for {deadline_s:g} s" if hung else ""
        if beat is not None and (failure := beat.exception()):
            return f"the engine core failed a heartbeat: {failure!r}"
        self._heartbeat_since = self._clock()
        self._heartbeat = asyncio.ensure_future(self.llm.get_weight_version())
        return ""
