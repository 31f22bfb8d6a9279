"""An engine whose processes go on while actor after actor takes it over."""

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from releases import TINY, Weights, weights

from offbeat.config.run import RunConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import EngineUnavailable
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.plugins.vllm.coverage import Coverage
from offbeat.plugins.vllm.engine import VllmEngine
from offbeat.plugins.vllm.engine_actor import VllmEngineActor
from offbeat.plugins.vllm.server import Started, start
from offbeat.plugins.vllm.weights import WeightUpdates
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.transport import PublishedRelease

FENCE = Fence("run", 1)
NAME = "generator-0"
PROMPT = (2, 5, 14, 8, 17)
PATIENCE_S = 120.0
END = 1
"""End of sequence of the model that the tests' copy was made of; the copy has none."""


def endless_model(folder: Path, model: Path = TINY) -> Path:
    """A model without an end of sequence: a sample is as long as it may be."""
    copy = folder / "endless"
    if not copy.is_dir():
        shutil.copytree(model, copy)
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((copy / name).read_bytes())
            for inner in (settings, settings.get("text_config", {})):
                inner["eos_token_id"] = None
            (copy / name).write_text(json.dumps(settings))
    return copy


def spec_in(
    run_dir: Path, model: Path | None = None, dtype: str = "float32", **vllm: Any
) -> EngineSpec:
    """The tiny model, or another; ``vllm`` goes into ``generator.vllm``."""
    model = model or endless_model(run_dir)
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": str(model), "dtype": dtype},
            "generator": {
                "backend": "vllm",
                "vllm": {"engine_args": {"enforce_eager": True}, **vllm},
            },
        }
    )
    return EngineSpec(
        name=NAME,
        model=config.model,
        generator=config.generator,
        stub=config.stub,
        seed=0,
        run_dir=str(run_dir),
    )


class Engine(VllmEngineActor):
    """An engine actor whose parts a test may look at."""

    @property
    def engine(self) -> VllmEngine:
        return self._vllm

    @property
    def updates(self) -> WeightUpdates:
        return self._updates

    def believe(self, release: PublishedRelease) -> None:
        """Take it for served what the changes of a release apply to."""
        assert release.delta is not None
        self._digest = release.delta.base
        self._kept_base.serves(release.delta.base, release.manifest, ())


class TakenOver(Engine):
    """Its end is not the engine's: what was open is ended, and the next actor may come."""

    async def close(self) -> None:
        self._requests.cancel_all()
        await self._updates.idle()
        await self._vllm.lose("its actor was closed")
        await self._vllm.llm.resume_generation()
        self._updates.close()


class Shared:
    """The engine and its event loop."""

    def __init__(self, spec: EngineSpec, runner: asyncio.Runner) -> None:
        self.spec, self.runner = spec, runner
        self.started: Started = runner.run(self._start())

    async def _start(self) -> Started:
        return start(self.spec)

    @property
    def llm(self) -> Any:
        return self.started[1]

    def actor(self) -> TakenOver:
        """An actor that has taken over, without weights of the run."""
        return TakenOver(self.spec, self.started)

    def play(
        self,
        story: Callable[[TakenOver], Awaitable[None]],
        *,
        llm: Any = None,
        in_place: bool = False,
        keeps_base: bool = False,
        **vllm: Any,
    ) -> None:
        """Tell a story on an actor that has taken over.

        ``llm`` stands between the actor and the engine; ``in_place``: weights are never prepared
        beside decoding; ``keeps_base``: it takes deltas.
        """

        async def told() -> None:
            model = self.spec.model
            spec = spec_in(Path(self.spec.run_dir), Path(model.path), model.dtype, **vllm)
            spec = replace(spec, keeps_base=keeps_base)
            actor = TakenOver(spec, (self.started[0], llm or self.llm))
            actor.updates.in_place = in_place
            try:
                await story(actor)
            finally:
                await actor.close()

        self.runner.run(told())

    async def tokens_of(self, id_: str, at_least: int) -> None:
        """Return once a sample of this request has so many tokens."""
        processor = self.llm.output_processor

        def are_there() -> bool:
            states = [s for s in processor.request_states.values() if s.external_req_id == id_]
            return any(s.detokenizer.num_output_tokens() >= at_least for s in states)

        await until(are_there)

    def note(self, measured: str) -> None:
        """For whoever reads the captured output (``pytest -rA``)."""
        sys.stdout.write(f"{measured}\n")

    def close(self) -> None:
        self.llm.shutdown()


async def until(holds: Callable[[], bool]) -> None:
    """For what vLLM and the operating system tell nobody."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.002)


class Anything(Coverage):
    """Lets every manifest through to vLLM."""

    def check(self, epoch: int, manifest: Manifest) -> None:
        del epoch, manifest


ANYTHING = Anything({}, "float32", tied=False)


async def load(actor: VllmEngineActor, epoch: int, release: WeightRelease) -> WeightsAck:
    """As the controller's adapter calls it."""
    return await actor.load(FENCE, epoch, release.without_handles(), *release.handles)


async def fetch(
    actor: VllmEngineActor, epoch: int, version: int, release: PublishedRelease
) -> WeightsAck:
    """Have it fetch a full release from the ranks that hold it, as the controller's port does."""
    manifest, digest, handles, *_ = release
    about = WeightRelease(version, digest, manifest, (), manifest.nbytes)
    return await actor.load(FENCE, epoch, about, *handles)


async def layout_of(actor: VllmEngineActor) -> EngineLayout:
    """What its workers load."""
    layout = await actor.layout(FENCE)
    assert layout is not None
    return layout


async def serve(actor: VllmEngineActor, epoch: int, version: int) -> Weights:
    """Have it take a version; the weights of it."""
    await load(actor, epoch, weights(version).release)
    return weights(version)


async def ask(
    actor: Engine,
    id_: str = "r",
    *,
    samples: int = 4,
    tokens: int = 24,
    temperature: float = 1.0,
    seed: int | None = 1,
    ends: tuple[int, ...] = (),
    **others: Any,
) -> GenerateResult:
    """A request as an environment worker's arrives."""
    sampling = SamplingParams(temperature, 1.0, tokens, ends, seed)
    sampling = msgspec.structs.replace(sampling, **others)
    return await actor.generate(GenerateRequest(id_, PROMPT, samples, sampling))


async def refused(actor: Engine) -> str:
    """Why it generates nothing."""
    try:
        await ask(actor, "refused?")
    except EngineUnavailable as unavailable:
        return unavailable.problem
    raise AssertionError("it generated")


def running(folder: Path, model: Path, tensor_parallel: int) -> Iterator[Shared]:
    """Yield an engine of so many workers, and close it afterwards: the rest of a fixture."""
    with asyncio.Runner() as runner:
        shared = Shared(spec_in(folder, model, tensor_parallel=tensor_parallel), runner)
        yield shared
        shared.close()
