"""Each way a sync can fail on a real engine: what it serves afterwards, and that a full sync heals it."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from faulty_llm import Fault, FaultyLlm
from outcomes import heals, is_exact, is_stale, still_serves
from releases import released, weights
from shared_engine import ANYTHING, Shared, TakenOver, ask, load, serve

from offbeat.actors.generators.vllm.staging import StagingArea
from offbeat.messages.failures import WeightSyncFailed
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.manifest import plan

CHUNKS = len(weights(1).release.chunks)
_DEADLINE_S = 5.0  # only where a call hangs: the others may be slow


def with_tensors(release: WeightRelease, change: Any) -> WeightRelease:
    """A release whose manifest was made of other ``(name, shape, dtype)``, its bytes to match."""
    kept = [change(spec) for spec in release.manifest.tensors]
    manifest = plan([each for each in kept if each is not None], 200_000)
    return released(9, manifest, [np.zeros(size, np.uint8) for size in manifest.chunk_nbytes])


def without_k_proj(spec: Any) -> Any:
    return None if "layers.1.self_attn.k_proj" in spec.name else (spec.name, spec.shape, spec.dtype)


def with_another_name(spec: Any) -> Any:
    name = "model.normal.weight" if spec.name == "model.norm.weight" else spec.name
    return name, spec.shape, spec.dtype


def in_bfloat16(spec: Any) -> Any:
    return spec.name, spec.shape, "bfloat16"


def one_column_less(spec: Any) -> Any:
    narrow = "lm_head" in spec.name
    return spec.name, (spec.shape[0], spec.shape[1] - narrow) if narrow else spec.shape, spec.dtype


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_k_proj, "model.layers.1.self_attn.k_proj.weight"),
        (with_another_name, "model.normal.weight"),
        (in_bfloat16, "bfloat16, expected float32"),
        (one_column_less, "shape of lm_head.weight"),
    ],
)
def test_a_release_that_does_not_fit_touches_nothing(
    shared: Shared, change: Any, said: str
) -> None:
    async def story(actor: TakenOver) -> None:
        held = await serve(actor, 1, 1)
        with pytest.raises(WeightSyncFailed, match=said):
            await load(actor, 2, with_tensors(held.release, change))
        await still_serves(actor, held, 1)
        await heals(actor, 3)

    shared.play(story)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_flipped_bit_in_any_chunk_touches_nothing(shared: Shared, chunk: int) -> None:
    async def story(actor: TakenOver) -> None:
        held = await serve(actor, 1, 1)
        chunks = [each.copy() for each in weights(2).release.chunks]
        chunks[chunk][7] ^= 1
        torn = msgspec.structs.replace(weights(2).release, chunks=tuple(chunks))
        with pytest.raises(WeightSyncFailed, match="digest"):
            await load(actor, 2, torn)
        await still_serves(actor, held, 1)

    shared.play(story)


class Corrupting(StagingArea):
    """Memory that loses a bit after the actor has hashed it, while it is told to."""

    corrupt = False

    def fill(self, chunks: Any) -> list[tuple[int, int, str]]:
        placed = super().fill(chunks)
        self._memory[placed[-1][0]] ^= self.corrupt
        return placed


def test_memory_that_differs_in_the_worker_is_found_there_before_a_layer_opens(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        actor.updates.area = area = Corrupting()
        held = await serve(actor, 1, 1)
        area.corrupt = True
        with pytest.raises(WeightSyncFailed, match="in the worker"):
            await load(actor, 2, weights(2).release)
        await still_serves(actor, held, 1)
        area.corrupt = False
        await heals(actor, 3)

    shared.play(story)


BROKEN: list[tuple[str, int, Fault]] = [
    *(("update_weights", chunk, "is lost") for chunk in range(CHUNKS)),
    *(("update_weights", chunk, "answer is lost") for chunk in range(CHUNKS)),
    ("update_weights", CHUNKS - 1, "hangs"),
    ("finish_weight_update", 0, "is lost"),
    ("finish_weight_update", 0, "answer is lost"),
    ("get_weight_version", 1, "raises"),  # 0 is a heartbeat
    ("resume_generation", 0, "is lost"),
]


@pytest.mark.parametrize(("call", "turn", "fault"), BROKEN)
def test_a_sync_that_breaks_half_way_leaves_the_engine_stale_until_a_whole_one(
    shared: Shared, call: str, turn: int, fault: Fault
) -> None:
    """Every chunk, and what follows; ``hangs`` ends by the call's deadline."""
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        faulty.faults[call, turn] = fault
        with pytest.raises(WeightSyncFailed):
            await load(actor, 2, weights(2).release)
        assert not faulty.faults, "the fault did not strike"
        await is_stale(actor)
        await heals(actor, 3)

    limits = {"call_deadline_s": _DEADLINE_S} if fault == "hangs" else {}
    shared.play_through(faulty, story, **limits)


@pytest.mark.parametrize("chunk", [0, CHUNKS // 2, CHUNKS - 1])
def test_a_tensor_that_the_loader_refuses_leaves_a_mixture_that_a_whole_sync_heals(
    shared: Shared, chunk: int
) -> None:
    """vLLM's own loader raises inside a chunk: coverage is told to let it through."""

    async def story(actor: TakenOver) -> None:
        held = await serve(actor, 1, 1)
        victim = next(
            walk_spec for walk_spec in walk(held.release.manifest) if walk_spec.index == chunk
        )
        name = victim.specs[-1].name

        def misshapen(spec: Any) -> Any:
            shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.name == name else spec.shape
            return spec.name, shape, spec.dtype

        coverage, actor.updates.coverage = actor.updates.coverage, ANYTHING
        with pytest.raises(WeightSyncFailed, match=name):
            await load(actor, 2, with_tensors(held.release, misshapen))
        await is_stale(actor)
        actor.updates.coverage = coverage
        await heals(actor, 3)

    shared.play(story)


def test_what_ran_while_a_sync_failed_is_told_to_go_elsewhere(shared: Shared) -> None:
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        running = asyncio.ensure_future(ask(actor, "long", samples=8, tokens=400))
        await shared.tokens_of("long", at_least=10)
        faulty.faults["update_weights", 0] = "raises"
        with pytest.raises(WeightSyncFailed):
            await load(actor, 2, weights(2).release)
        with pytest.raises(Exception, match="failed half-way"):
            await running
        await heals(actor, 3)

    shared.play_through(faulty, story)


def test_a_cancelled_sync_ends_as_a_failed_one(shared: Shared) -> None:
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        reached = asyncio.Event()

        async def strike() -> None:
            reached.set()
            await asyncio.Event().wait()

        faulty.before["update_weights", 3] = strike
        sync = asyncio.ensure_future(load(actor, 2, weights(2).release))
        await reached.wait()
        sync.cancel()
        await asyncio.wait([sync])
        assert sync.cancelled()
        await is_stale(actor)
        await heals(actor, 3)

    shared.play_through(faulty, story)


def test_a_sync_whose_ack_was_lost_is_given_once_more_in_a_new_epoch(shared: Shared) -> None:
    """The same release again changes nothing; what arrives late of the old epoch is refused."""

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        lost = await load(actor, 2, weights(2).release)
        again = await load(actor, 3, weights(2).release)
        assert (again.version, again.digest) == (lost.version, lost.digest)
        await is_exact(actor, weights(2), 2)
        for late in (2, 3):
            with pytest.raises(WeightSyncFailed, match="a newer transfer was begun"):
                await load(actor, late, weights(1).release)
        await still_serves(actor, weights(2), 2)

    shared.play(story)
