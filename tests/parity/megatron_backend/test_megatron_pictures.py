"""Image-text models over megatron-core: the torch trainer's step, states, names and values."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, Told, apart, told
from megatron_world import MegatronWorld
from parity_cases import BOUND, CHUNKS, TOKENS, Outcome, Step
from parity_cases import Cut as TorchCut
from parity_cases import MegatronCut as Cut
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from world import World

from offbeat.messages.media import get_media
from offbeat.models.media_canaries import canary_prompts
from offbeat.models.media_rules import media_rules
from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.plugins.megatron.checks import largest_rank
from offbeat.trainers.torch.forward import top_logprobs
from offbeat.trainers.torch.sharding import Weights
from offbeat.weight_sync.grid import ModelGrid
from tests.support.grid_steps import Families, pictured
from tests.support.image_text_models import make, pictures, plain_logprobs
from tests.support.pictures import features
from tests.support.plain_modules import ModuleReceiver

# Qwen's tower rounds to float32 inside: parts of a step that are cut otherwise add up otherwise.
BOUNDS = {"idefics3": BOUND, "qwen2_5_vl": 1e-7, "qwen3_vl": 1e-7, "qwen3_vl_moe": 1e-7}
ONE, DATA, TENSOR, PIPELINE = Cut(), Cut(data=2), Cut(tensor=2), Cut(pipeline=2)
SEQUENCE, CONTEXT = Cut(tensor=2, sequence=True), Cut(context=2)
EXPERTS = Cut(tensor=2, expert=2, sequence=True)
MIXED, TEXT = (1, 2, 0, 1, 3, 0, 1), (0, 0, 0)


def step_of(family: str, counts: tuple[int, ...]) -> Step:
    """A step on groups with so many pictures each."""
    return Step(*pictured(counts, family, least_id=1))


@pytest.fixture(scope="module")
def torch_step(world: World, families: Families) -> Callable[..., Told]:
    """What the torch trainer makes of a step on one rank that holds tower and decoder."""
    made = dict[tuple[str, tuple[int, ...]], Told]()

    def of(family: str, counts: tuple[int, ...]) -> Told:
        if (family, counts) not in made:
            (outcome,) = world.run(
                1,
                "torch_backend.torch_jobs:split",
                path=families(family),
                cut=TorchCut(),
                step=step_of(family, counts),
                loss=TOKENS,
                chunks=(1,),
            )
            whole = Outcome(outcome.result, outcome.gradients, outcome.weights, outcome.digest)
            made[family, counts] = told(whole, TOKENS)
        return made[family, counts]

    return of


def assert_alike(got: Told, want: Told, bound: float = BOUND) -> None:
    """The same names, and the same values, relative to the largest of all: some gradients are zero."""
    assert got.in_step, "replicas or tied copies differ"
    zeros = {n: np.zeros(1) for n in got.weights.keys() - want.gradients.keys()}
    for mine, theirs in ((got.gradients, want.gradients | zeros), (got.weights, want.weights)):
        assert mine.keys() == theirs.keys()
        largest = max(np.abs(each).max() for each in theirs.values())
        for name, each in theirs.items():
            assert np.abs(mine[name] - each).max() <= bound * largest, name
    assert (got.result.tokens, got.result.applied) == (want.result.tokens, True)
    assert got.result.loss == pytest.approx(want.result.loss, rel=bound)
    assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=bound)


@pytest.mark.parametrize(
    ("family", "cut", "counts"),
    [
        ("idefics3", ONE, MIXED),
        ("idefics3", DATA, (1, 0, 0)),  # one rank has no picture
        ("idefics3", TENSOR, MIXED),
        ("idefics3", TENSOR, TEXT),
        ("idefics3", SEQUENCE, MIXED),
        ("idefics3", PIPELINE, MIXED),
        ("idefics3", CONTEXT, MIXED),
        ("idefics3", Cut(tensor=2, data=2, sequence=True, shared_prompt=False), MIXED),
        ("idefics3", Cut(pipeline=2, data=2, recompute=True), MIXED),
        ("qwen2_5_vl", SEQUENCE, MIXED),
        ("qwen2_5_vl", PIPELINE, MIXED),
        ("qwen2_5_vl", Cut(context=2, shared_prompt=False), MIXED),
        ("qwen3_vl", TENSOR, MIXED),
        ("qwen3_vl", Cut(tensor=2, pipeline=2, sequence=True), MIXED),
        ("qwen3_vl", CONTEXT, MIXED),
        ("qwen3_vl_moe", ONE, MIXED),
        ("qwen3_vl_moe", Cut(data=2, expert=2), (1, 0, 0)),  # one rank has no picture
        ("qwen3_vl_moe", EXPERTS, MIXED),
        ("qwen3_vl_moe", Cut(context=2, pipeline=2, expert=2), MIXED),
    ],
    ids=lambda each: (
        each
        if isinstance(each, str)
        else "-".join(map(str, each))
        if isinstance(each, tuple)
        else f"t{each.tensor}p{each.pipeline}c{each.context}d{each.data}e{each.expert}"
    ),
)
def test_a_step_on_pictures_in_any_chunks_under_any_layout_is_the_torch_trainers(
    megatron_world: MegatronWorld,
    families: Families,
    torch_step: Callable[..., Told],
    family: str,
    cut: Cut,
    counts: tuple[int, ...],
) -> None:
    want = torch_step(family, counts)
    replies = megatron_world.run(
        cut.ranks,
        "split",
        path=families(family),
        cut=cut,
        step=JobStep.of(step_of(family, counts), TOKENS),
        chunks=CHUNKS,
    )
    for outcomes in replies:
        for each in outcomes:
            assert_alike(each, want, BOUNDS[family])


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        ("idefics3", SEQUENCE),
        ("idefics3", PIPELINE),
        ("qwen2_5_vl", TENSOR),
        ("qwen3_vl_moe", EXPERTS),
    ],
    ids=["sequence", "pp2", "three axes, tp2", "experts, ep2 of tp2"],
)
def test_log_probabilities_behind_pictures_are_those_of_transformers(
    megatron_world: MegatronWorld, families: Families, family: str, cut: Cut
) -> None:
    step, model = step_of(family, (1, 0, 2)), make(family)
    replies = megatron_world.run(
        cut.ranks,
        "logprobs",
        path=families(family),
        cut=replace(cut, dtype="float32"),
        step=JobStep.of(step, TOKENS),
        temperature=1.0,
    )
    for group, count, *columns in zip(step.groups, (1, 0, 2), *replies, strict=True):
        media = get_media(group) if count else None
        prompt, offsets = group["prompt_ids"].tolist(), group["response_offsets"]
        responses = [group["response_ids"][a:b].tolist() for a, b in pairwise(offsets)]
        with torch.no_grad():
            want = torch.cat([plain_logprobs(model, prompt, each, media) for each in responses])
        for each in columns:
            np.testing.assert_allclose(each["policy_logprobs"], want.numpy(), atol=2e-5)
            np.testing.assert_array_equal(each["policy_logprobs"], each["reference_logprobs"])


@pytest.mark.parametrize("cut", [ONE, SEQUENCE, PIPELINE], ids=["one", "sequence", "pp2"])
@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_canaries_with_pictures_are_those_of_the_torch_trainer(
    megatron_world: MegatronWorld, families: Families, family: str, cut: Cut
) -> None:
    model = make(family)
    prompts = canary_prompts(64, media_rules(model.config))
    tokens, logprobs = top_logprobs(model, prompts, 8)
    for got in megatron_world.run(
        cut.ranks,
        "top_logprobs",
        path=families(family),
        cut=replace(cut, dtype="float32"),
        prompts=prompts,
    ):
        assert got[0] == tokens
        np.testing.assert_allclose(got[1], logprobs, atol=2e-5)


@pytest.mark.parametrize(
    "family", ["idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
)
def test_weights_have_the_torch_trainers_names_and_values_and_files_those_of_the_model(
    megatron_world: MegatronWorld, families: Families, tmp_path: Path, family: str
) -> None:
    path = families(family)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    want = apart({name: each.numpy() for name, each in Weights(model).iterate()})
    digests = set[str]()
    for cut in (ONE, SEQUENCE, PIPELINE):
        target = tmp_path / f"{cut.tensor}-{cut.pipeline}"
        for weights, digest, parameters in megatron_world.run(
            cut.ranks, "exported", path=path, cut=replace(cut, dtype="float32"), target=target
        ):
            assert weights.keys() == want.keys()
            assert all((weights[name] == want[name]).all() for name in want)
            assert parameters == sum(each.numel() for each in model.parameters())
            digests.add(digest)
        files = load_file(path / "model.safetensors")
        again = load_file(target / "model.safetensors")
        assert again.keys() == files.keys()
        assert all(torch.equal(again[name], files[name]) for name in files)
        AutoModelForImageTextToText.from_pretrained(target)
    assert len(digests) == 1, "the digest depends on the layout"


def test_experts_are_read_and_exported_in_the_form_of_the_models_files(
    megatron_world: MegatronWorld, families: Families, tmp_path: Path
) -> None:
    """transformers reads both forms; the hub's files have the last two axes in reverse."""
    path, turned = families("qwen3_vl_moe"), tmp_path / "turned"
    shutil.copytree(path, turned)
    files = load_file(path / "model.safetensors")
    fused = {name for name in files if ".experts." in name}
    assert len(fused) == 4
    files |= {name: files[name].mT.contiguous() for name in fused}
    save_file(files, turned / "model.safetensors", {"format": "pt"})
    cut = replace(EXPERTS, dtype="float32")
    got = [
        megatron_world.run(2, "exported", path=each, cut=cut, target=tmp_path / f"{index}")
        for index, each in enumerate((path, turned))
    ]
    assert {digest for replies in got for _, digest, _ in replies} == {got[0][0][1]}
    again = load_file(tmp_path / "1" / "model.safetensors")
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name], files[name]) for name in files)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "1")


@pytest.mark.parametrize(
    ("written", "read"),
    [(ONE, SEQUENCE), (DATA, PIPELINE), (PIPELINE, DATA)],
    ids=["1 to sequence", "dp2 to pp2", "pp2 to dp2"],
)
def test_a_state_with_a_tower_is_taken_up_under_another_layout(
    megatron_world: MegatronWorld,
    families: Families,
    tmp_path: Path,
    written: Cut,
    read: Cut,
) -> None:
    options = {"learning_rate": 1e-2, "eps": 1e-2}
    path, step = families("idefics3"), JobStep.of(step_of("idefics3", MIXED), TOKENS)
    before, after = (replace(each, optimizer=options) for each in (written, read))
    (want, digest), *_ = megatron_world.run(
        before.ranks, "saved", path=path, cut=before, step=step, directory=tmp_path
    )
    for second, taken_up, initial, applied, reset in megatron_world.run(
        after.ranks, "loaded", path=path, cut=after, step=step, directory=tmp_path
    ):
        assert (taken_up, applied, reset) == (digest, 1, (initial, 0))
        assert initial != digest
        assert_alike(second, want)


def test_a_state_with_a_tower_is_taken_up_bit_for_bit_under_its_own_layout(
    megatron_world: MegatronWorld, families: Families, tmp_path: Path
) -> None:
    path, step = families("idefics3"), JobStep.of(step_of("idefics3", MIXED), TOKENS)
    given = {"path": path, "cut": replace(SEQUENCE, dtype="bfloat16"), "step": step}
    before = megatron_world.run(2, "saved", directory=tmp_path, **given)
    after = megatron_world.run(2, "loaded", directory=tmp_path, **given)
    for (want, digest), (got, taken_up, *_) in zip(before, after, strict=True):
        assert taken_up == digest
        assert got.result.loss == want.result.loss
        assert all((got.weights[name] == want.weights[name]).all() for name in want.weights)


@pytest.mark.parametrize("cut", [TENSOR, PIPELINE], ids=["tp2", "pp2"])
def test_sharded_receivers_get_the_tower_from_ranks_that_hold_it(
    megatron_world: MegatronWorld, families: Families, cut: Cut
) -> None:
    answers = megatron_world.run(2, "sent", path=families("idefics3"), cut=cut)
    assert [same for same, _ in answers] == [True, True]


def test_an_embedded_engine_computes_pictures_with_the_tower_it_received(
    megatron_world: MegatronWorld, families: Families, tmp_path: Path
) -> None:
    path, step = families("idefics3"), step_of("idefics3", MIXED)
    ((manifest, chunks, digest), *_) = megatron_world.run(
        2,
        "released",
        path=path,
        cut=replace(TENSOR, dtype="float32"),
        step=JobStep.of(step, TOKENS),
        generator="embedded",
        target=tmp_path / "trained",
    )
    served = AutoModelForImageTextToText.from_pretrained(path)
    before = features(served, (pictures(1),)).embedded_FH
    receiver = ModuleReceiver(served)
    receiver.begin(1, manifest)
    for index, chunk in enumerate(chunks):
        assert receiver.apply(1, index, chunk)
    receiver.verify(digest)
    receiver.commit(1)
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")
    got = features(served, (pictures(1),)).embedded_FH
    assert torch.equal(got, features(trained, (pictures(1),)).embedded_FH)
    assert not torch.equal(got, before)


@pytest.mark.parametrize("cut", [SEQUENCE, PIPELINE], ids=["sequence", "pp2"])
def test_a_rank_holds_the_bytes_of_the_tower_that_are_declared(
    megatron_world: MegatronWorld, families: Families, cut: Cut
) -> None:
    path, step = families("idefics3"), JobStep.of(step_of("idefics3", (1, 0)), TOKENS)
    replies = megatron_world.run(2, "held", path=path, cut=cut, step=step)
    assert all(declared == shapes for declared, shapes, _ in replies)
    grid = ModelGrid(tensor=cut.tensor, pipeline=cut.pipeline)
    largest = largest_rank(read_architecture(path), grid, "float64", sharded=False)
    assert max((each for *_, each in replies), key=lambda each: each.total) == largest


def test_the_optimizer_of_cuda_ends_three_clipped_steps_where_the_other_ends(
    megatron_world: MegatronWorld, families: Families
) -> None:
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "eps": 1e-2}
    cut = Cut(tensor=2, data=2, dtype="float32", optimizer=options)
    step = JobStep.of(step_of("idefics3", MIXED), TOKENS)
    given = {"path": families("idefics3"), "step": step, "count": 3}
    (want, *_) = megatron_world.run(4, "steps", cut=cut, **given)
    assert want[0].result.grad_norm > 0.5, "nothing was clipped"
    for outcomes in megatron_world.run(
        4, "steps", cut=replace(cut, updates="ShardedAdamW"), **given
    ):
        for got, wanted in zip(outcomes, want, strict=True):
            assert got.in_step, "replicas differ"
            assert got.result.grad_norm == pytest.approx(wanted.result.grad_norm, rel=2e-5)
            for name, each in wanted.weights.items():
                np.testing.assert_allclose(got.weights[name], each, atol=2e-5)
