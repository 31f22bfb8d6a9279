"""Proves a kind of engine with releases of one model, and requests."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.config.sections.generator import StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import (
    CanaryFailed,
    EngineUnavailable,
    OffbeatError,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.weights import Canary, EngineState, WeightRelease, WeightsAck
from offbeat.testing.engines import EngineRefused
from offbeat.weight_sync.canary import KEPT, TOLERANCE_FLOAT32, prompts
from offbeat.weight_sync.chunks import GatheredSource, dtype_name, iterate_weights
from offbeat.weight_sync.manifest import release_digest

FENCE: Final = Fence("proof", 1)
LOGPROB_ERROR: Final = 1e-3
"""Maximum nats by which a float32 engine may differ from a plain forward pass."""

T = TypeVar("T")
_CHUNK_BYTES: Final = 1 << 20
_ENDS: Final = "generation_config.json"
_FLAT: Final = 100.0
"""Temperature at which every token is about equally probable for any model."""

_MANY: Final = 16
"""Number of requests to cancel. They have over two hundred tokens, even if samples end early."""

_FEW_TOKENS: Final = 200
"""Maximum tokens that the step in progress may draw between a cancel and the next answer."""


def prove(
    plugin: EnginePlugin, model: Path, generator: Mapping[str, Any], deadline_s: float
) -> None:
    """Prove a kind of engine; see ``prove_engine``."""
    proof = _Proof(type(plugin).__name__, model, deadline_s)
    with tempfile.TemporaryDirectory() as run_dir:
        spec = EngineSpec(
            name="generator-0",
            model=ModelConfig.model_validate({"path": str(model), "dtype": "float32"}),
            generator=plugin.section.model_validate({"max_model_len": 64, **generator}),
            stub=StubConfig(),
            seed=0,
            run_dir=run_dir,
        )
        many_ends = Path(run_dir) / "many_ends"
        end_ids = _copy_with_many_ends(model, many_ends, proof.vocabulary)
        ending = replace(
            spec, model=ModelConfig.model_validate({"path": str(many_ends), "dtype": "float32"})
        )

        @asynccontextmanager
        async def open_server(spec: EngineSpec) -> AsyncGenerator[EngineServer]:
            server: EngineServer = plugin.server_class()(spec)
            try:
                yield server
            finally:
                if not proof.is_stuck:  # closing would hang as well
                    await proof.await_answer(server.close(), "close")

        async def main() -> None:
            async with open_server(spec) as server:
                await proof.run(server)
            await proof.is_refused(server, "after close")
            async with open_server(ending) as server:
                await proof.run_with_many_ends(server, end_ids)

        asyncio.run(main())


class _Proof:
    """The engine's promises, one method each."""

    def __init__(self, subject: str, model: Path, deadline_s: float) -> None:
        self._subject, self._deadline_s, self.is_stuck = subject, deadline_s, False
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, local_files_only=True
        ).eval()
        self._noise = torch.Generator().manual_seed(0)
        self._epoch = self._requests = 0

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens of the model."""
        return self._model.config.vocab_size

    async def run(self, server: EngineServer) -> None:
        await self.is_refused(server, "before its first release")
        first = self._release(1)
        await self._loads(server, first)
        await self._serves(server, 1)
        self._change()
        await self._loads(server, self._release(2))
        await self._serves(server, 2)
        await self._refuses(server, _damage(self._release(3)), WeightSyncFailed, "is damaged")
        await self._serves(server, 2)
        await self._draws_by_the_seed(server)
        await self._ends_at_a_stop_token(server)
        await self._leaves_nothing_behind(server)
        old, self._epoch = self._epoch, 0
        await self._refuses(server, first, WeightSyncFailed, "is of an older epoch")
        self._epoch = old
        await self._drops_requests_of_lost_weights(server, 4)
        await self.is_refused(server, "after a canary that it failed")
        await self._loads(server, self._release(5))
        await self._serves(server, 5)

    async def run_with_many_ends(self, server: EngineServer, end_ids: range) -> None:
        """Prove that a sample ends with the first end id of the model's files, and keeps it."""
        await self._loads(server, self._release(6))
        result = await self._generate(server, self._request(_FLAT, 24, of=0, seed=7))
        for tokens, reason in zip(_samples(result), result.finish_reasons, strict=True):
            first = next((at for at, each in enumerate(tokens) if each in end_ids), len(tokens))
            if first < len(tokens) - 1 or (reason == "stop") != (first < len(tokens)):
                problem = (
                    f"a sample of {len(tokens)} tokens has an end id of {_ENDS} as token {first + 1}, "
                    f"and ended with {reason!r}"
                )
                fix = "End a sample with the first of end_ids_of the model, keep the token, and say 'stop'"
                raise EngineRefused(self._subject, problem, fix)

    async def is_refused(self, server: EngineServer, when: str) -> None:
        """Check that the engine refuses every request."""
        try:
            await self._generate(server, self._request())
        except EngineUnavailable:
            return
        fix = "Keep EngineServer.generate, which asks for the version first"
        raise EngineRefused(self._subject, f"it answers {when}", fix)

    async def await_answer(self, call: Awaitable[T], name: str) -> T:
        """Return the answer of a call, which must arrive within the deadline."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await call
        except TimeoutError:
            problem = f"{name} had no answer within {self._deadline_s:g} s"
            fix = "Return from step after each token; give a slow engine a longer deadline_s"
            self.is_stuck = True
            raise EngineRefused(self._subject, problem, fix) from None

    async def _generate(self, server: EngineServer, request: GenerateRequest) -> GenerateResult:
        return await self.await_answer(server.generate(request), "generate")

    async def _load(self, server: EngineServer, release: WeightRelease) -> WeightsAck:
        self._epoch += 1
        call = server.load(FENCE, self._epoch, release.without_handles(), *release.handles)
        return await self.await_answer(call, f"load of version {release.version}")

    async def _loads(self, server: EngineServer, release: WeightRelease) -> None:
        try:
            ack = await self._load(server, release)
        except EngineRefused:
            raise
        except OffbeatError as error:
            problem = f"it does not load version {release.version}: {error}"
            fix = "Serve the module's own tensors, and answer the canary with them"
            raise EngineRefused(self._subject, problem, fix) from error
        state = await self._state(server)
        if (ack.version, ack.digest) != (release.version, release.digest) or (
            state.version != release.version
        ):
            problem = f"after release {release.version} it acknowledges {ack.version}, {ack.digest}"
            raise EngineRefused(self._subject, problem, "Keep EngineServer.load")
        if ack.canary_gap is None:
            problem = f"the canary of release {release.version} was not checked"
            raise EngineRefused(self._subject, problem, "Check it in _load_release")

    async def _refuses(
        self, server: EngineServer, release: WeightRelease, error: type[OffbeatError], what: str
    ) -> None:
        try:
            await self._load(server, release)
        except error:
            return
        problem = f"it acknowledges a release that {what}"
        raise EngineRefused(self._subject, problem, "Verify a release before it is served")

    async def _serves(self, server: EngineServer, version: int) -> None:
        """Check two concurrent requests: shapes, versions and every logprob."""
        asked = [self._request(1.0), self._request(0.7)]
        answers = asyncio.gather(*map(server.generate, asked))
        for request, result in zip(
            asked, await self.await_answer(answers, "generate"), strict=True
        ):
            self._check_form(request, result, version)
            for sample in range(request.samples):
                self._check_logprobs(request, result, sample, version)

    async def _draws_by_the_seed(self, server: EngineServer) -> None:
        """Check that the same seed gives the same tokens, and each sample gets different tokens."""
        one, again, other = [
            await self._generate(server, self._request(_FLAT, of=0, seed=seed))
            for seed in (7, 7, 8)
        ]
        if not np.array_equal(one.token_ids, again.token_ids):
            problem = "the same seed gives different tokens the second time"
            fix = "Draw each by the seed"
        elif np.array_equal(one.token_ids, other.token_ids):
            problem, fix = "two seeds give the same tokens", "Draw by SamplingParams.seed"
        elif all(len({tuple(each) for each in _samples(drawn)}) == 1 for drawn in (one, other)):
            problem, fix = "all samples of a request are alike", "Draw each sample on its own"
        else:
            return
        raise EngineRefused(self._subject, problem, fix)

    async def _ends_at_a_stop_token(self, server: EngineServer) -> None:
        """Check that a sample ends with a token of ``stop_token_ids``, and keeps that token."""
        drawn = _samples(await self._generate(server, self._request(of=0, seed=7)))[0]
        ended = await self._generate(server, self._request(of=0, seed=7, stop=(drawn[0],)))
        if _samples(ended)[0] != drawn[:1] or ended.finish_reasons[0] != "stop":
            problem = (
                f"with stop_token_ids=({drawn[0]},) it drew {_samples(ended)[0]} and ended with "
                f"{ended.finish_reasons[0]!r}"
            )
            fix = "End a sample with the first of stop_token_ids, keep the token, and say 'stop'"
            raise EngineRefused(self._subject, problem, fix)

    async def _drops_requests_of_lost_weights(self, server: EngineServer, lost: int) -> None:
        """Check that requests that are open during a failing release end, without that version."""
        release, is_over = self._with_a_wrong_canary(lost), asyncio.Event()

        async def ask() -> None:
            while not is_over.is_set():
                try:
                    result = await server.generate(self._request(_FLAT, tokens=48))
                except EngineUnavailable:
                    return
                if any(version == lost for spans in result.version_spans for version, _ in spans):
                    problem = f"it stamps tokens with version {lost}, which it has not acknowledged"
                    raise EngineRefused(self._subject, problem, "Drop open requests in lose")

        asking = [asyncio.ensure_future(ask()) for _ in range(4)]
        try:
            await asyncio.wait(asking, timeout=0.01)
            await self._refuses(server, release, CanaryFailed, "has a wrong canary")
            is_over.set()
            await self.await_answer(asyncio.gather(*asking), "generate during a failing release")
        finally:
            await self._cancel(asking)
        await self._holds_nothing(server, "that were open when it lost its weights", "lose")

    async def _leaves_nothing_behind(self, server: EngineServer) -> None:
        """Check that cancelled requests end, even if the engine serves one at a time."""
        calls = [
            asyncio.ensure_future(server.generate(self._request(_FLAT, tokens=48)))
            for _ in range(_MANY)
        ]
        await asyncio.wait(calls, timeout=0.01)
        await self._cancel(calls)
        before = await self._state(server)
        await self._generate(server, self._request(tokens=1))
        after = await self._holds_nothing(server, "of a cancelled request", "drop")
        if (drawn := after.tokens - before.tokens) > _FEW_TOKENS:
            problem = f"it draws {drawn} tokens for cancelled requests"
            raise EngineRefused(self._subject, problem, "Remove them in drop")

    async def _cancel(self, calls: "Sequence[asyncio.Future[Any]]") -> None:
        for call in calls:
            call.cancel()
        if not self.is_stuck:
            await self.await_answer(asyncio.wait(calls), "a cancelled generate")

    async def _holds_nothing(self, server: EngineServer, which: str, method: str) -> EngineState:
        """Check that no samples are open."""
        state = await self._state(server)
        if state.running or state.waiting:
            counts = f"{state.running} samples and {state.waiting} waiting requests"
            problem = f"{counts} {which} are still there"
            raise EngineRefused(self._subject, problem, f"Remove them in {method}")
        return state

    async def _state(self, server: EngineServer) -> EngineState:
        return await self.await_answer(server.state(FENCE), "state")

    def _request(
        self,
        temperature: float = 1.0,
        tokens: int = 6,
        *,
        of: int | None = None,
        seed: int | None = None,
        stop: tuple[int, ...] = (),
    ) -> GenerateRequest:
        """Return the next request, for the next prompt or for prompt ``of``."""
        self._requests += 1
        ids = prompts(self.vocabulary)[self._requests % 4 if of is None else of]
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=tokens, stop_token_ids=stop, seed=seed
        )
        return GenerateRequest(f"proof-{self._requests}", ids, 3, sampling)

    def _check_form(self, request: GenerateRequest, result: GenerateResult, version: int) -> None:
        lengths = [int(each) for each in result.offsets[1:] - result.offsets[:-1]]
        spans = tuple(((version, length),) for length in lengths)
        wrong = {
            "request_id": result.request_id != request.request_id,
            "offsets": len(lengths) != request.samples or int(result.offsets[0]) != 0,
            "token_ids": len(result.token_ids) != sum(lengths),
            "logprobs": len(result.logprobs) != sum(lengths),
            "lengths of samples": any(
                not 1 <= each <= request.sampling.max_new_tokens for each in lengths
            ),
            "finish_reasons": not set(result.finish_reasons) <= {"stop", "length"}
            or len(result.finish_reasons) != request.samples,
            f"version_spans, which are not all {version}": result.version_spans != spans,
        }
        if bad := [name for name, is_wrong in wrong.items() if is_wrong]:
            problem = f"its answer has wrong {', '.join(bad)}"
            raise EngineRefused(self._subject, problem, "See offbeat.interfaces.GenerateResult")

    def _check_logprobs(
        self, request: GenerateRequest, result: GenerateResult, sample: int, version: int
    ) -> None:
        own = slice(int(result.offsets[sample]), int(result.offsets[sample + 1]))
        tokens = result.token_ids[own].tolist()
        ids = [*request.prompt_ids, *tokens]
        logits_TV = self._logits(ids)[len(request.prompt_ids) - 1 : -1]
        plain = torch.log_softmax(logits_TV / request.sampling.temperature, -1)
        expected = plain[torch.arange(len(tokens)), torch.tensor(tokens)]
        error = (expected - torch.from_numpy(result.logprobs[own].copy())).abs().max().item()
        if not error <= LOGPROB_ERROR:
            problem = (
                f"a logprob of version {version} is {error:.3g} nats from a plain forward pass"
            )
            fix = (
                "Return logprobs of softmax(logits / temperature), under the weights that it stamps"
            )
            raise EngineRefused(self._subject, problem, fix)

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int]) -> Tensor:
        return self._model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()

    def _release(self, version: int) -> WeightRelease:
        tensors = dict(iterate_weights(self._model))
        metas = [(name, tuple(each.shape), dtype_name(each)) for name, each in tensors.items()]
        source = GatheredSource(metas, lambda: iter(tensors.items()), _CHUNK_BYTES)
        chunks, digests = zip(*source.chunks(), strict=True)
        canary = self._canary()
        manifest = msgspec.structs.replace(source.manifest.seal(digests), canary=canary)
        digest = release_digest(manifest, digests)
        return WeightRelease(version, digest, manifest, chunks, manifest.nbytes, canary)

    def _canary(self) -> Canary:
        asked = prompts(self.vocabulary)
        logprobs = [torch.log_softmax(self._logits(each)[-1], -1) for each in asked]
        best = [each.topk(min(KEPT, len(each))) for each in logprobs]
        tokens = tuple(tuple(each.indices.tolist()) for each in best)
        values = tuple(tuple(each.values.tolist()) for each in best)
        return Canary(asked, tokens, values, TOLERANCE_FLOAT32)

    def _with_a_wrong_canary(self, version: int) -> WeightRelease:
        """Return new weights with the canary of the previous weights."""
        stale = self._canary()
        self._change()
        fresh = self._release(version)
        manifest = msgspec.structs.replace(fresh.manifest, canary=stale)
        return msgspec.structs.replace(fresh, manifest=manifest, canary=stale)

    def _change(self) -> None:
        """Change every weight, so that every distribution changes."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                noise = torch.randn(parameter.shape, generator=self._noise)
                parameter.add_(0.5 * parameter.abs().mean() * noise)


def _samples(result: GenerateResult) -> list[list[int]]:
    """Return the token ids of each sample."""
    return [each.tolist() for each in np.split(result.token_ids, result.offsets[1:-1])]


def _damage(release: WeightRelease) -> WeightRelease:
    """Return a release with one bit of its first chunk flipped."""
    first, *others = release.chunks
    damaged = np.frombuffer(first, np.uint8).copy()
    damaged[len(damaged) // 2] ^= 1
    return msgspec.structs.replace(release, chunks=(damaged, *others))


def _copy_with_many_ends(model: Path, copy: Path, vocabulary: int) -> range:
    """Create a model directory of links, with every second token as end id. Return these ids."""
    end_ids = range(0, vocabulary, 2)
    copy.mkdir()
    for each in model.resolve().iterdir():
        if each.name != _ENDS:
            (copy / each.name).symlink_to(each)
    named = model / _ENDS
    settings: dict[str, Any] = json.loads(named.read_bytes()) if named.is_file() else {}
    (copy / _ENDS).write_text(json.dumps(settings | {"eos_token_id": [*end_ids]}))
    return end_ids
