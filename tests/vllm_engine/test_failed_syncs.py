"""Each way a sync can fail on a real engine: what it serves afterwards, and that a full sync heals it."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from faulty_llm import Fault, FaultyLlm
from outcomes import FP32_NATS, heals, is_exact, is_stale, still_serves
from releases import released, weights
from shared_engine import ANYTHING, PROMPT, Shared, TakenOver, ask, load, serve

from offbeat.messages.failures import EngineUnavailable, WeightSyncFailed
from offbeat.messages.weights import WeightRelease
from offbeat.plugins.vllm.staging import StagingArea
from offbeat.weight_sync.chunks import walk
from offbeat.weight_sync.manifest import plan

CHUNKS = len(weights(1).release.chunks)
_DEADLINE_S = 5.0  # only where a call hangs: the others may be slow
PLACES = pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])


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
        served = await serve(actor, 1, 1)
        with pytest.raises(WeightSyncFailed, match=said):
            await load(actor, 2, with_tensors(served.release, change))
        await still_serves(actor, served, 1)
        await heals(actor, 3)

    shared.play(story)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_flipped_bit_in_any_chunk_touches_nothing(shared: Shared, chunk: int) -> None:
    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        chunks = [each.copy() for each in weights(2).release.chunks]
        chunks[chunk][7] ^= 1
        torn = msgspec.structs.replace(weights(2).release, chunks=tuple(chunks))
        with pytest.raises(WeightSyncFailed, match=f"digest of chunk {chunk} in worker 0"):
            await load(actor, 2, torn)
        await still_serves(actor, served, 1)
        await heals(actor, 3)

    shared.play(story)


def test_a_release_whose_digest_is_another_touches_nothing(shared: Shared) -> None:
    """Chunks and their digests fit each other, but not what the controller was told."""

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        other = msgspec.structs.replace(weights(2).release, digest=weights(3).release.digest)
        with pytest.raises(WeightSyncFailed, match="digest is"):
            await load(actor, 2, other)
        await still_serves(actor, served, 1)
        await heals(actor, 3)

    shared.play(story)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda chunks: chunks[:-1], f"chunks received is {CHUNKS - 1}"),
        (lambda chunks: chunks[::-1], "size of chunk|digest of chunk 0"),
        (lambda chunks: (chunks[0][:-1], *chunks[1:]), "size of chunk 0"),
    ],
    ids=["missing", "in another order", "too short"],
)
def test_chunks_that_are_not_those_of_the_manifest_touch_nothing(
    shared: Shared, change: Any, said: str
) -> None:
    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        release = weights(2).release
        torn = msgspec.structs.replace(release, chunks=change(release.chunks))
        with pytest.raises(WeightSyncFailed, match=said):
            await load(actor, 2, torn)
        await still_serves(actor, served, 1)
        await heals(actor, 3)

    shared.play(story)


class Corrupting(StagingArea):
    """Memory that loses a bit on the way to the workers, while it is told to."""

    corrupt = False

    def fill(self, chunks: Any) -> list[int]:
        offsets = super().fill(chunks)
        self._memory[offsets[-1]] ^= self.corrupt
        return offsets


@PLACES
def test_memory_that_differs_in_the_worker_is_found_there_before_a_layer_opens(
    shared: Shared, in_place: bool
) -> None:
    async def story(actor: TakenOver) -> None:
        actor.updates.area = area = Corrupting()
        served = await serve(actor, 1, 1)
        area.corrupt = True
        with pytest.raises(WeightSyncFailed, match=f"digest of chunk {CHUNKS - 1} in worker 0"):
            await load(actor, 2, weights(2).release)
        await still_serves(actor, served, 1)
        area.corrupt = False
        await heals(actor, 3)

    shared.play(story, in_place=in_place)


UPDATES: list[tuple[str, int, Fault]] = [
    ("start_weight_update", 0, "is lost"),
    ("start_weight_update", 0, "answer is lost"),
    *(("update_weights", chunk, "is lost") for chunk in range(CHUNKS)),
    *(("update_weights", chunk, "answer is lost") for chunk in range(CHUNKS)),
    ("update_weights", CHUNKS - 1, "hangs"),
]
SWAPS: list[tuple[str, int, Fault]] = [
    ("finish_weight_update", 0, "is lost"),
    ("finish_weight_update", 0, "answer is lost"),
    ("get_weight_version", 1, "raises"),  # 0 is a heartbeat
    ("resume_generation", 0, "is lost"),
]


@pytest.mark.parametrize(
    ("in_place", "call", "turn", "fault"),
    [*((False, *swap) for swap in SWAPS), *((True, *each) for each in (*UPDATES, *SWAPS))],
)
def test_a_sync_that_breaks_half_way_leaves_the_engine_stale_until_a_whole_one(
    shared: Shared, in_place: bool, call: str, turn: int, fault: Fault
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

    limits: dict[str, Any] = {"call_deadline_s": _DEADLINE_S} if fault == "hangs" else {}
    shared.play(story, llm=faulty, in_place=in_place, **limits)


@pytest.mark.parametrize(("call", "turn", "fault"), UPDATES)
def test_a_sync_that_breaks_while_it_is_prepared_touches_nothing(
    shared: Shared, call: str, turn: int, fault: Fault
) -> None:
    """Beside decoding, every chunk: what runs goes on, to its end, on the weights of before."""
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        running = asyncio.ensure_future(ask(actor, "long", samples=2, tokens=60))
        await shared.tokens_of("long", at_least=1)
        faulty.faults[call, turn] = fault
        with pytest.raises(WeightSyncFailed):
            await load(actor, 2, weights(2).release)
        assert not faulty.faults, "the fault did not strike"
        assert served.worst_error(PROMPT, await running) < FP32_NATS
        await still_serves(actor, served, 1)
        await heals(actor, 3)

    limits: dict[str, Any] = {"call_deadline_s": _DEADLINE_S} if fault == "hangs" else {}
    shared.play(story, llm=faulty, **limits)


@PLACES
@pytest.mark.parametrize("chunk", [0, CHUNKS // 2, CHUNKS - 1])
def test_a_tensor_that_the_loader_refuses_is_named_and_a_whole_sync_heals(
    shared: Shared, in_place: bool, chunk: int
) -> None:
    """vLLM's own loader raises inside a chunk: coverage is told to let it through.

    In place that leaves a mixture, beside decoding nothing.
    """

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        victim = next(each for each in walk(served.release.manifest) if each.index == chunk)
        name = victim.specs[-1].name

        def misshapen(spec: Any) -> Any:
            shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.name == name else spec.shape
            return spec.name, shape, spec.dtype

        coverage, actor.updates.coverage = actor.updates.coverage, ANYTHING
        with pytest.raises(WeightSyncFailed, match=name):
            await load(actor, 2, with_tensors(served.release, misshapen))
        await (is_stale(actor) if in_place else still_serves(actor, served, 1))
        actor.updates.coverage = coverage
        await heals(actor, 3)

    shared.play(story, in_place=in_place)


@pytest.mark.parametrize(
    ("in_place", "call"), [(False, "finish_weight_update"), (True, "update_weights")]
)
def test_what_ran_while_a_sync_failed_half_way_is_told_to_go_elsewhere(
    shared: Shared, in_place: bool, call: str
) -> None:
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        running = asyncio.ensure_future(ask(actor, "long", samples=8, tokens=400))
        await shared.tokens_of("long", at_least=10)
        faulty.faults[call, 0] = "raises"
        with pytest.raises(WeightSyncFailed):
            await load(actor, 2, weights(2).release)
        with pytest.raises(EngineUnavailable, match=r"failed half-way|failed while this ran"):
            await running
        await heals(actor, 3)

    shared.play(story, llm=faulty, in_place=in_place)


@pytest.mark.parametrize(
    ("in_place", "call", "turn"),
    [
        (False, "update_weights", 3),
        (False, "finish_weight_update", 0),
        (True, "update_weights", 3),
    ],
)
def test_a_cancelled_sync_ends_as_a_failed_one(
    shared: Shared, in_place: bool, call: str, turn: int
) -> None:
    faulty = FaultyLlm(shared.llm)

    async def story(actor: TakenOver) -> None:
        served = await serve(actor, 1, 1)
        reached = asyncio.Event()

        async def strike() -> None:
            reached.set()
            await asyncio.Event().wait()

        faulty.before[call, turn] = strike
        sync = asyncio.ensure_future(load(actor, 2, weights(2).release))
        await reached.wait()
        sync.cancel()
        await asyncio.wait([sync])
        assert sync.cancelled()
        prepared = call == "update_weights" and not in_place
        await (still_serves(actor, served, 1) if prepared else is_stale(actor))
        await heals(actor, 3)

    shared.play(story, llm=faulty, in_place=in_place)


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
        await heals(actor, 4)

    shared.play(story)
