"""A vision tower that is not trained, or in part, over megatron-core: on its ranks, and on ranks of its own."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, Told, told
from megatron_grid_cases import assert_ranks_hold_what_check_says, on_grid, step_of, worst
from parity_cases import BOUND, TOKENS, Outcome
from parity_cases import Cut as TorchCut
from parity_cases import MegatronCut as Cut
from safetensors import safe_open
from world import World

from offbeat.plugins.megatron.state import SavedShares
from offbeat.trainers.checkpoints.manifest import Identity
from tests.support.grid_steps import Families

VISION, PROJECTOR = ("model.vision_model.*",), ("model.connector.*",)
WHOLE = (*VISION, *PROJECTOR)
FREEZES = {"tower": WHOLE, "projector": PROJECTOR, "vision model": VISION}
ONE, TENSOR, PIPELINE = Cut(), Cut(tensor=2), Cut(pipeline=2)
SEQUENCE, DATA = Cut(tensor=2, sequence=True), Cut(data=2)
WORLDS = {
    "one rank": (ONE, 0),
    "tp2": (TENSOR, 0),
    "1 + 1": (ONE, 1),
    "tp2 + 1": (SEQUENCE, 1),
    "pp2 + 1": (PIPELINE, 1),
}
MIXED, TEXT, EQUAL = (1, 2, 0, 1, 3, 0, 1), (0, 0, 0), (1, 1, 1, 1)
DECAYED = {"learning_rate": 1e-2, "eps": 1.0, "weight_decay": 0.1, "max_grad_norm": None}

Patterns = tuple[str, ...]
in_worlds = pytest.mark.parametrize(("cut", "encoders"), WORLDS.values(), ids=list(WORLDS))
with_each_part = pytest.mark.parametrize("frozen", FREEZES.values(), ids=list(FREEZES))


def is_frozen(name: str, frozen: Patterns) -> bool:
    return any(fnmatchcase(name, each) for each in frozen)


def job_of(counts: tuple[int, ...], family: str = "idefics3") -> JobStep:
    return JobStep.of(step_of(counts, family), TOKENS)


def after(
    world: World, path: Path, cut: Cut, encoders: int, *steps: JobStep
) -> list[dict[str, Any]]:
    """What each rank has seen of these steps."""
    return on_grid(world, "megatron_freeze_jobs:trained", cut, encoders, path=path, steps=steps)


@pytest.fixture(scope="module")
def torch_step(world: World, families: Families) -> Callable[..., Told]:
    """What the torch trainer makes of a step in one process that freezes the same."""
    made = dict[tuple[Any, ...], Told]()

    def of(frozen: Patterns, counts: tuple[int, ...] = MIXED, family: str = "idefics3") -> Told:
        key = (frozen, counts, family)
        if key not in made:
            (seen,) = world.run(
                1,
                "torch_backend.grid_jobs:stepped",
                path=families(family),
                cut=TorchCut(),
                step=step_of(counts, family),
                lanes=1,
                encoders=0,
                freeze=frozen,
                chunks=(1,),
            )
            outcome = Outcome(seen["result"], seen["gradients"], seen["weights"], seen["digest"])
            made[key] = told(outcome, TOKENS)
        return made[key]

    return of


def assert_step_is(seen: dict[str, Any], want: Told, frozen: Patterns, bound: float) -> None:
    """Gradients of what is trained and of nothing else; and the step that follows from them."""
    trained = {name for name in want.weights if not is_frozen(name, frozen)}
    assert seen["gradients"].keys() == trained
    zeros = {name: np.zeros(1) for name in trained - want.gradients.keys()}
    assert worst(seen["gradients"], want.gradients | zeros) <= bound
    assert worst(seen["first"], want.weights) <= bound
    result = seen["results"][0]
    assert (result.tokens, result.applied) == (want.result.tokens, True)
    assert result.loss == pytest.approx(want.result.loss, rel=bound)
    assert result.grad_norm == pytest.approx(want.result.grad_norm, rel=bound)


def moved(seen: dict[str, Any]) -> set[str]:
    before, weights = seen["before"], seen["weights"]
    return {name for name in weights if (weights[name] != before[name]).any()}


@in_worlds
@with_each_part
def test_gradients_of_what_is_trained_are_those_of_a_torch_trainer_that_freezes_the_same(
    world: World,
    families: Families,
    torch_step: Callable[..., Told],
    cut: Cut,
    encoders: int,
    frozen: Patterns,
) -> None:
    want, path = torch_step(frozen), families("idefics3")
    for seen in after(world, path, replace(cut, freeze=frozen), encoders, job_of(MIXED)):
        assert_step_is(seen, want, frozen, BOUND)
        assert moved(seen) == {name for name in want.weights if not is_frozen(name, frozen)}


@pytest.mark.parametrize(
    ("cut", "encoders"),
    [(SEQUENCE, 0), (replace(SEQUENCE, encoder_tensor=2), 1)],
    ids=["tp2", "tp2 + tp2"],
)
@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("qwen2_5_vl", ("model.visual.*",)),
        ("qwen2_5_vl", ("model.visual.blocks.*",)),
        ("qwen3_vl", ("model.visual.*",)),
        ("qwen3_vl", ("model.visual.*merger*",)),
    ],
)
def test_families_with_axes_and_deeper_features_do_so_too(
    world: World,
    families: Families,
    torch_step: Callable[..., Told],
    cut: Cut,
    encoders: int,
    family: str,
    frozen: Patterns,
) -> None:
    want, given = torch_step(frozen, MIXED, family), replace(cut, freeze=frozen)
    for seen in after(world, families(family), given, encoders, job_of(MIXED, family)):
        assert_step_is(seen, want, frozen, 1e-7)


@in_worlds
@with_each_part
def test_a_step_on_text_alone_trains_the_language_model(
    world: World,
    families: Families,
    torch_step: Callable[..., Told],
    cut: Cut,
    encoders: int,
    frozen: Patterns,
) -> None:
    want, path = torch_step(frozen, TEXT), families("idefics3")
    for seen in after(world, path, replace(cut, freeze=frozen), encoders, job_of(TEXT)):
        assert_step_is(seen, want, frozen, BOUND)


@in_worlds
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("frozen", [WHOLE, VISION], ids=["tower", "vision model"])
def test_a_frozen_weight_keeps_its_bits_and_has_no_gradient_no_master_and_no_moments(
    world: World, families: Families, cut: Cut, encoders: int, dtype: str, frozen: Patterns
) -> None:
    given = replace(cut, freeze=frozen, dtype=dtype, optimizer=DECAYED)
    steps = [job_of(MIXED), job_of(TEXT), job_of(EQUAL)]
    ranks = after(world, families("idefics3"), given, encoders, *steps)
    kinds = ["with gradient", "exp_avg", "exp_avg_sq"]
    kinds += ["master"] if dtype == "bfloat16" else []
    for seen in ranks:
        trained = {name for name in seen["weights"] if not is_frozen(name, frozen)}
        assert not {name for name in moved(seen) if is_frozen(name, frozen)}
        assert seen["digest"] == ranks[0]["digest"] != seen["initial"]
        for kind in kinds:
            assert set().union(*(each.get(kind, ()) for each in ranks)) == trained, kind
    assert all(each.applied for seen in ranks for each in seen["results"])
    if dtype == "float64":
        assert moved(ranks[0]) == trained


@pytest.mark.parametrize(
    ("cut", "encoders"),
    [(ONE, 1), (SEQUENCE, 1), (PIPELINE, 1)],
    ids=["1 + 1", "tp2 + 1", "pp2 + 1"],
)
def test_no_gradient_of_features_goes_back_to_a_tower_that_is_frozen_as_a_whole(
    world: World, families: Families, cut: Cut, encoders: int
) -> None:
    """A trained tower gets as many numbers back as it sends, in messages of equal size in float64."""

    def received(frozen: Patterns) -> float:
        given = replace(cut, freeze=frozen)
        first, *_ = after(world, families("idefics3"), given, encoders, job_of(EQUAL))
        return first["results"][0].metrics["train/bridge_bytes"]

    features = received(WHOLE)
    assert features > 0
    assert received(VISION) == received(PROJECTOR) == received(()) == 2 * features


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((ONE, 1), (ONE, 0)),
        ((TENSOR, 0), (PIPELINE, 1)),
        ((SEQUENCE, 1), (ONE, 1)),
        ((ONE, 0), (replace(ONE, encoder_tensor=2), 1)),
    ],
    ids=[
        "1 + 1, then one rank",
        "tp2, then pp2 + 1",
        "tp2 + 1, then 1 + 1",
        "one rank, then 1 + tp2",
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("frozen", [WHOLE, VISION], ids=["tower", "vision model"])
def test_a_checkpoint_has_frozen_weights_without_moments_and_is_taken_up_in_another_world(
    world: World,
    families: Families,
    tmp_path: Path,
    wrote: tuple[Cut, int],
    reads: tuple[Cut, int],
    dtype: str,
    frozen: Patterns,
) -> None:
    given = {"path": families("idefics3"), "step": job_of(MIXED)}

    def step(at: tuple[Cut, int], load: Path | None, save: Path | None) -> list[dict[str, Any]]:
        cut = replace(at[0], dtype=dtype, freeze=frozen)
        return on_grid(world, "continued", cut, at[1], **given, load=load, save=save)

    state = tmp_path / "state"
    state.mkdir()
    first = step(wrote, None, state)
    saved = names_in(state)
    weights = first[0]["weights"].keys()
    assert saved["weight"] == weights
    for kind in saved.keys() - {"weight"}:
        assert saved[kind] == {name for name in weights if not is_frozen(name, frozen)}
    with SavedShares(state) as shares:
        assert shares.steps == 1
        assert dict(shares.weights()).keys() == weights  # what a torch trainer would start from
    want = step(wrote, state, None)[0]["weights"]
    for seen in step(reads, state, None):
        assert seen["loaded"] == first[0]["saved"]
        assert seen["reset"]
        if dtype == "float64":
            assert worst(seen["weights"], want) <= 1e-9


def names_in(state: Path) -> dict[str, set[str]]:
    """The tensors in the files of a state, by kind."""
    found = dict[str, set[str]]()
    for file in state.glob("share-*.safetensors"):
        with safe_open(file, framework="np") as opened:
            for key in opened.keys():  # noqa: SIM118 -- no mapping
                kind, slash, rest = key.partition("/")
                if slash:
                    found.setdefault(kind, set()).add(rest.rpartition("@")[0])
    return found


def test_a_state_belongs_to_what_was_frozen_in_any_world(world: World, families: Families) -> None:
    path, step = families("idefics3"), job_of(TEXT)

    def about(frozen: Patterns, name: str) -> tuple[Identity, int, str]:
        cut, encoders = WORLDS[name]
        first, *_ = after(world, path, replace(cut, freeze=frozen), encoders, step)
        return first["identity"], first["state"], first["initial"]

    identity, nbytes, initial = about(WHOLE, "one rank")
    assert about(WHOLE, "tp2 + 1") == (identity, nbytes, initial)
    other, more, same = about(PROJECTOR, "1 + 1")
    assert other.fingerprint != identity.fingerprint
    assert (same, more > nbytes) == (initial, True)
    assert " of them frozen" in identity.model


@in_worlds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@with_each_part
def test_ranks_hold_the_bytes_that_check_says(
    world: World, families: Families, cut: Cut, encoders: int, dtype: Any, frozen: Patterns
) -> None:
    path, given = families("idefics3"), replace(cut, dtype=dtype, freeze=frozen)
    step = {"path": path, "step": job_of(EQUAL), "reference": False}
    ranks = on_grid(world, "megatron_grid_weight_jobs:held", given, encoders, **step)
    held = [nbytes for _, nbytes in ranks]
    assert_ranks_hold_what_check_says(path, held, given, encoders, frozen=frozen)


@pytest.mark.parametrize(
    ("cut", "encoders"), [(DATA, 0), (TENSOR, 0), (DATA, 2)], ids=["dp2", "tp2", "dp2 + 2"]
)
@with_each_part
def test_the_optimizer_of_cuda_leaves_out_what_is_frozen(
    world: World, families: Families, cut: Cut, encoders: int, frozen: Patterns
) -> None:
    options = {**DECAYED, "eps": 1e-4, "max_grad_norm": 0.01}
    whole = replace(cut, dtype="float32", optimizer=options, freeze=frozen)
    path, steps = families("idefics3"), [job_of(MIXED), job_of(EQUAL)]
    want, *_ = after(world, path, whole, encoders, *steps)
    ranks = after(world, path, replace(whole, updates="ShardedAdamW"), encoders, *steps)
    trained = {name for name in want["weights"] if not is_frozen(name, frozen)}
    for seen in ranks:
        assert moved(seen) == trained
        assert worst(seen["weights"], want["weights"]) <= 2e-5
        for kind in ("exp_avg", "with gradient"):
            assert set().union(*(each.get(kind, ()) for each in ranks)) == trained, kind


@pytest.mark.parametrize(
    ("cut", "encoders"), [(TENSOR, 0), (ONE, 1), (PIPELINE, 1)], ids=["tp2", "1 + 1", "pp2 + 1"]
)
@pytest.mark.parametrize("frozen", [WHOLE, PROJECTOR], ids=["tower", "projector"])
def test_sharded_receivers_get_frozen_weights_too(
    world: World, families: Families, cut: Cut, encoders: int, frozen: Patterns
) -> None:
    path, given = families("idefics3"), replace(cut, dtype="bfloat16", freeze=frozen)
    ranks = on_grid(world, "megatron_grid_weight_jobs:sent", given, encoders, path=path)
    assert all(same for same, _ in ranks)


@in_worlds
@pytest.mark.parametrize(
    ("pattern", "told_of"),
    [
        ("model.text_model.layers.0.*", "has model.text_model.layers.0."),
        ("lm_head.*", "has lm_head.weight in its language model"),
        ("model.visual.*", "has no parameter whose name matches 'model.visual.*'"),
    ],
)
def test_every_rank_refuses_at_its_start_what_is_not_of_the_tower(
    world: World, families: Families, cut: Cut, encoders: int, pattern: str, told_of: str
) -> None:
    path, given = families("idefics3"), replace(cut, freeze=(*PROJECTOR, pattern))
    for said in on_grid(world, "megatron_freeze_jobs:refusal", given, encoders, path=path):
        assert told_of in said
        assert pattern in said
