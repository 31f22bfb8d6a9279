"""``offbeat verify-weights --engine`` on vLLM: the load leg, through joined and packed matrices."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from releases import Weights, weights
from shared_engine import Engine, Shared, TakenOver, load

from offbeat.messages.weights import WeightRelease
from offbeat.plugins.verify_weights.legs import LegResult, compare_served
from offbeat.weight_sync.chunks import tensor_views, walk
from offbeat.weight_sync.manifest import digest_bytes

ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


class Confused:
    """Has the workers take each of two tensors of equal shape for the other, as a loader may."""

    def __init__(self, llm: Any, first: str, second: str) -> None:
        self.llm, self.other = llm, {first: second, second: first}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        if method == "ws_plan":
            chunks, *rest = args
            args = (
                [[(self.other.get(each[0], each[0]), *each[1:]) for each in c] for c in chunks],
                *rest,
            )
        return await self.llm.collective_rpc(method, args=args)


def without_canary(release: WeightRelease) -> WeightRelease:
    manifest = msgspec.structs.replace(release.manifest, canary=None)
    return msgspec.structs.replace(release, manifest=manifest, canary=None)


async def load_leg(actor: Engine) -> LegResult:
    _, leg = compare_served(await actor.served_weights(), "no checkpoint")
    return leg


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_worker_computes_with_is_the_release(shared: Shared, *, in_place: bool) -> None:
    async def story(actor: TakenOver) -> None:
        for version in (1, 0):
            await load(actor, 3 - version, weights(version).release)
            leg = await load_leg(actor)
            assert leg.is_equal, leg

    shared.play(story, in_place=in_place)


@pytest.mark.parametrize(
    ("first", "second", "within"),
    [
        (f"{ATTENTION}k_proj.weight", f"{ATTENTION}v_proj.weight", f"{ATTENTION}qkv_proj.weight"),
        (f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight", f"{MLP}gate_up_proj.weight"),
        (
            "model.layers.0.input_layernorm.weight",
            "model.layers.1.input_layernorm.weight",
            "model.layers.0.input_layernorm.weight",
        ),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_tensor_that_a_loader_took_for_another_is_named_as_the_trainer_names_it(
    shared: Shared, first: str, second: str, within: str, *, in_place: bool
) -> None:
    async def story(actor: TakenOver) -> None:
        await load(actor, 1, without_canary(weights(1).release))
        leg = await load_leg(actor)
        assert leg.difference is not None, leg
        assert leg.difference.tensor == first
        assert f"in {within}" in leg.difference.detail

    shared.play(story, llm=Confused(shared.llm, first, second), in_place=in_place)


@pytest.mark.parametrize(
    "name", [f"{ATTENTION}v_proj.weight", f"{MLP}down_proj.weight", "lm_head.weight"]
)
def test_one_element_that_differs_is_named_with_its_place(shared: Shared, name: str) -> None:
    """The release in memory is changed behind the workers' back, which is all the same to them."""

    async def story(actor: TakenOver) -> None:
        await load(actor, 1, weights(1).release)
        changed(actor, weights(1), name)
        leg = await load_leg(actor)
        assert leg.difference is not None, leg
        assert (leg.difference.tensor, leg.difference.region) == (name, "[3:4, 5:6]")

    shared.play(story)


def changed(actor: Engine, served: Weights, name: str) -> None:
    updates = actor.updates
    loaded, manifest = updates._loaded, served.release.manifest  # noqa: SLF001 -- of what it compares
    assert loaded is not None and loaded.offsets is not None
    (chunk,) = [each for each in walk(manifest) if name in each.names]
    start = loaded.offsets[chunk.index]
    data = updates.area._memory[start : start + chunk.nbytes]  # noqa: SLF001 -- the same
    dict(tensor_views(chunk, data))[name][3, 5] += 1
    digests = list(manifest.chunk_digests)
    digests[chunk.index] = digest_bytes(data)
    updates._loaded = loaded._replace(manifest=manifest.seal(digests))  # noqa: SLF001 -- the same


def test_the_head_that_is_tied_to_an_embedding_is_read_back_as_well(tied: Shared) -> None:
    async def story(actor: TakenOver) -> None:
        new = weights(1, model=Path(tied.spec.model.path))
        await load(actor, 1, new.release)
        leg = await load_leg(actor)
        assert leg.is_equal, leg

    tied.play(story)


def test_a_release_that_is_not_in_memory_any_more_is_not_taken_for_one_that_differs(
    shared: Shared,
) -> None:
    async def story(actor: TakenOver) -> None:
        await load(actor, 1, weights(1).release)
        memory = actor.updates.area._memory  # noqa: SLF001 -- as a later, refused release leaves it
        memory[:64] ^= 255
        leg = await load_leg(actor)
        assert leg.difference is None
        assert "another release has taken the place" in leg.problem

    shared.play(story)
