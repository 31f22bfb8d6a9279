"""The proof of engines accepts the embedded engine, and refuses one for each promise that it breaks."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.config.sections.generator import EmbeddedGeneratorConfig, PluginGeneratorConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import LoadOutcome
from offbeat.generators.module_server import ReleaseLoader
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.weights import WeightRelease
from offbeat.testing import EngineRefused, prove_engine
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import ModuleTarget, Receiver
from tests.support.engine_servers import save_tiny_qwen3


class Plugin(EnginePlugin):
    section = cast("type[PluginGeneratorConfig]", EmbeddedGeneratorConfig)

    def __init__(self, server: type[EmbeddedEngineServer]) -> None:
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
    async def _load_release(self, epoch: int, release: WeightRelease, chunks: Any) -> LoadOutcome:
        manifest = msgspec.structs.replace(release.manifest, canary=None)
        unchecked = msgspec.structs.replace(release, manifest=manifest, canary=None)
        return await super()._load_release(epoch, unchecked, chunks)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def test_the_embedded_engine_is_accepted(tiny: Path) -> None:
    prove_engine(Plugin(EmbeddedEngineServer), tiny)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (AnswersWithoutWeights, "it answers before its first release"),
        (ForgetsTheVersion, "wrong version_spans, which are not all 1"),
        (ScalesNoLogprobs, "a logprob of version 1 is .* nats from a plain forward pass"),
        (KeepsItsWeights, "it does not load version 2: .* canary"),
        (ChecksNoCanary, "the canary of release 1 was not checked"),
    ],
)
def test_an_engine_that_breaks_a_promise_is_refused(
    tiny: Path, server: type[EmbeddedEngineServer], told: str
) -> None:
    with pytest.raises(EngineRefused, match=told):
        prove_engine(Plugin(server), tiny)
