"""The proof of engines accepts the embedded engine, and refuses one for each promise that it breaks."""

import asyncio
import threading
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.config.sections.generator import EmbeddedGeneratorConfig, PluginGeneratorConfig
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.embedded.start import load_served_model
from offbeat.generators.end_tokens import end_ids_of
from offbeat.generators.engine_loop import EngineLoop
from offbeat.generators.engine_server import LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.module_server import ModuleEngineServer, ReleaseLoader
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import EngineUnavailable
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.testing import EngineRefused, prove_engine
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import ModuleTarget, Receiver
from tests.support.engine_servers import save_tiny_qwen3


class Plugin(EnginePlugin):
    section = cast("type[PluginGeneratorConfig]", EmbeddedGeneratorConfig)

    def __init__(self, server: type[ModuleEngineServer]) -> None:
        self._server = server

    def server_class(self) -> type[Any]:
        return self._server


class AnswersWithoutWeights(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._engine.generate(request)


class ForgetsTheVersion(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        spans = tuple(((0, sum(n for _, n in each)),) for each in result.version_spans)
        return msgspec.structs.replace(result, version_spans=spans)


class ScalesNoLogprobs(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        logprobs = result.logprobs * request.sampling.temperature
        return msgspec.structs.replace(result, logprobs=logprobs)


class KeptTarget(ModuleTarget):
    def commit(self) -> None:
        self.rollback()


class KeepsItsWeights(EmbeddedEngineServer):
    async def _get_loader(self, epoch: int, manifest: Manifest) -> ReleaseLoader:
        target = KeptTarget(self._module)
        return ReleaseLoader(Receiver(target, self._name), target.read_back)


class ChecksNoCanary(EmbeddedEngineServer):
    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        manifest = msgspec.structs.replace(incoming.release.manifest, canary=None)
        incoming.release = msgspec.structs.replace(incoming.release, manifest=manifest, canary=None)
        return await super()._load_release(incoming)


class DropsNothing(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await asyncio.shield(super().generate(request))


class DrawsAnew(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sampling = msgspec.structs.replace(request.sampling, seed=None)
        return await super().generate(msgspec.structs.replace(request, sampling=sampling))


class HasOneSeed(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sampling = msgspec.structs.replace(request.sampling, seed=1)
        return await super().generate(msgspec.structs.replace(request, sampling=sampling))


class RepeatsASample(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        one = await super().generate(msgspec.structs.replace(request, samples=1))
        count, length = request.samples, len(one.token_ids)
        return msgspec.structs.replace(
            one,
            token_ids=np.tile(one.token_ids, count),
            logprobs=np.tile(one.logprobs, count),
            offsets=np.arange(count + 1, dtype=np.int64) * length,
            finish_reasons=one.finish_reasons * count,
            version_spans=one.version_spans * count,
        )


class StopsAtNoToken(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sampling = msgspec.structs.replace(request.sampling, stop_token_ids=())
        return await super().generate(msgspec.structs.replace(request, sampling=sampling))


class NeverAnswers(EmbeddedEngineServer):
    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await super().generate(request)
        await asyncio.get_running_loop().create_future()
        raise AssertionError


class StampsARefusedVersion(EmbeddedEngineServer):
    _newest = 0

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        self._newest = incoming.release.version
        return await super()._load_release(incoming)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        try:
            return await super().generate(request)
        except EngineUnavailable:
            if self._newest <= 1:
                raise
        return GenerateResult(
            request_id=request.request_id,
            token_ids=np.zeros(3, np.int32),
            logprobs=np.zeros(3, np.float32),
            offsets=np.arange(4, dtype=np.int64),
            finish_reasons=("length",) * 3,
            version_spans=(((self._newest, 1),),) * 3,
            engine=self._name,
            incarnation="",
        )


class FifoServer(ModuleEngineServer):
    """Serves one request after the other with a changed engine."""

    kind: ClassVar[type[EmbeddedEngine]] = EmbeddedEngine
    has_ends: ClassVar[bool] = True

    def __init__(self, spec: EngineSpec) -> None:
        engine = self.kind(
            load_served_model(spec),
            name=spec.name,
            incarnation="one",
            eos_token_ids=end_ids_of(spec.model.path) if self.has_ends else (),
            max_sequences=3,
            max_model_len=64,
            deterministic=False,
            device="cpu",
            seed=0,
        )
        super().__init__(spec, EngineLoop(engine), engine.model, "one")


class KeepsCancelledRequests(EmbeddedEngine):
    def drop(self, request_id: str) -> None:
        pass


class KeepsRequestsOfLostWeights(EmbeddedEngine):
    def lose(self, problem: str) -> None:
        self._lost = problem


class HangsInAStep(EmbeddedEngine):
    may_end: ClassVar = threading.Event()

    def step(self) -> list[GenerateResult]:
        self.may_end.wait()
        return []


class ServesAllItHas(FifoServer):
    kind = KeepsCancelledRequests


class ServesAfterItsLoss(FifoServer):
    kind = KeepsRequestsOfLostWeights


class ServesNoStep(FifoServer):
    kind = HangsInAStep


class EndsAtNoEndId(FifoServer):
    has_ends = False


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def test_the_embedded_engine_is_accepted(tiny: Path) -> None:
    prove_engine(Plugin(EmbeddedEngineServer), tiny)


def test_an_engine_that_serves_one_request_after_the_other_is_accepted(tiny: Path) -> None:
    prove_engine(Plugin(FifoServer), tiny)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (AnswersWithoutWeights, "it answers before its first release"),
        (ForgetsTheVersion, "wrong version_spans, which are not all 1"),
        (ScalesNoLogprobs, "a logprob of version 1 is .* nats from a plain forward pass"),
        (KeepsItsWeights, "it does not load version 2: .* canary"),
        (ChecksNoCanary, "the canary of release 1 was not checked"),
        (DropsNothing, "samples and .* of a cancelled request are still there"),
        (DrawsAnew, "the same seed gives different tokens the second time"),
        (HasOneSeed, "two seeds give the same tokens"),
        (RepeatsASample, "all samples of a request are alike"),
        (StampsARefusedVersion, "it stamps tokens with version 4, which it has not acknowledged"),
        (StopsAtNoToken, "with stop_token_ids=.* and ended with 'length'"),
        (ServesAllItHas, "it draws .* tokens for cancelled requests. Remove them in drop"),
        (ServesAfterItsLoss, "open when it lost its weights are still there. Remove them in lose"),
        (EndsAtNoEndId, "has an end id of generation_config.json as token .*'length'"),
    ],
)
def test_an_engine_that_breaks_a_promise_is_refused(
    tiny: Path, server: type[ModuleEngineServer], told: str
) -> None:
    with pytest.raises(EngineRefused, match=told):
        prove_engine(Plugin(server), tiny)


def test_an_engine_that_never_answers_is_refused_after_the_deadline(tiny: Path) -> None:
    with pytest.raises(EngineRefused, match=r"generate had no answer within 0\.5 s"):
        prove_engine(Plugin(NeverAnswers), tiny, deadline_s=0.5)


def test_a_step_that_hangs_is_named_after_the_deadline(tiny: Path) -> None:
    told = r"generate had no answer within 0\.5 s. Return from step"
    try:
        with pytest.raises(EngineRefused, match=told):
            prove_engine(Plugin(ServesNoStep), tiny, deadline_s=0.5)
    finally:
        HangsInAStep.may_end.set()  # its thread ends, and this process can
