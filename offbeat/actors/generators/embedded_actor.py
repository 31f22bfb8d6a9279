"""The Ray actor of the embedded engine."""

import asyncio
import threading
import time

import torch

from offbeat.actors.generators.embedded import EmbeddedEngine, load_model
from offbeat.actors.generators.engine_actor import Chunk, EngineActor, EngineSpec
from offbeat.actors.generators.engine_loop import EngineLoop
from offbeat.actors.process import incarnation, prepare
from offbeat.messages.failures import WeightSyncFailed
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import ModuleReceiver, TransferRefused


class EmbeddedEngineActor(EngineActor):
    """The embedded engine. Weights are swapped in place between two decode steps."""

    def __init__(self, spec: EngineSpec) -> None:
        config = spec.generator
        prepare(spec.name, spec.run_dir)
        torch.set_num_threads(config.threads)
        model = load_model(
            spec.model_path,
            getattr(torch, spec.model.dtype),
            config.device,
            trust_remote_code=spec.model.trust_remote_code,
        )
        life = incarnation(spec.name)
        engine = EmbeddedEngine(
            model,
            name=spec.name,
            incarnation=life,
            eos_token_ids=_end_tokens(model.generation_config.eos_token_id),
            max_sequences=config.max_sequences,
            max_model_len=config.max_model_len,
            deterministic=config.deterministic,
            seed=spec.seed,
            device=config.device,
        )
        self._loop = EngineLoop(engine)
        self._module = engine.model
        super().__init__(spec, self._loop, life)

    async def _take(
        self, epoch: int, version: int, digest: str, manifest: Manifest, chunks: tuple[Chunk, ...]
    ) -> float:
        # A receiver of its own: a transfer that was cancelled may still wait for the engine's
        # thread with its chunks staged, and must not meet those of the next one.
        receiver, given_up = ModuleReceiver(self._module), threading.Event()
        try:
            receiver.begin(epoch, manifest)
            for index, chunk in enumerate(chunks):
                receiver.apply(epoch, index, chunk)
            receiver.verify(digest)
        except TransferRefused as refused:
            raise WeightSyncFailed(self._name, epoch, version, str(refused)) from refused

        def commit(engine: EmbeddedEngine) -> float:
            started_s = time.perf_counter()
            if not given_up.is_set():
                receiver.commit(version)
                engine.set_version(version)
            return time.perf_counter() - started_s

        try:
            return await self._loop.between_steps(commit)
        except asyncio.CancelledError:
            given_up.set()
            raise


def _end_tokens(configured: int | list[int] | None) -> list[int]:
    """The model's end-of-sequence tokens, as a list."""
    match configured:
        case None:
            return []
        case int():
            return [configured]
        case _:
            return [int(token) for token in configured]
