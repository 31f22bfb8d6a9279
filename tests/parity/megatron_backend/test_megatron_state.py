"""States and weights of a world: written under one layout, taken up under another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import Cut
from megatron_cases import Step as JobStep
from megatron_reference import FULL, Step, hf_model, worst_relative_error
from megatron_world import MegatronWorld

Models = Callable[[str], Path]
OPTIONS = {"learning_rate": 1e-2, "eps": 1e-2}
ONE, TENSOR, PIPELINE = Cut(), Cut(tensor=2), Cut(pipeline=2)


@pytest.mark.parametrize(
    ("written", "read"),
    [(ONE, TENSOR), (TENSOR, ONE), (TENSOR, PIPELINE), (PIPELINE, Cut(tensor=2, data=2))],
    ids=["1-t2", "t2-1", "t2-p2", "p2-t2d2"],
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_state_is_taken_up_under_another_layout(
    megatron_world: MegatronWorld,
    models: Models,
    step_data: Step,
    tmp_path: Path,
    written: Cut,
    read: Cut,
    dtype: str,
) -> None:
    path, step = models("qwen3-tied"), JobStep(*step_data, FULL)
    written, read = (replace(each, optimizer=OPTIONS, dtype=dtype) for each in (written, read))
    before = megatron_world.run(
        written.ranks, "saved", path=path, cut=written, step=step, directory=tmp_path
    )
    want, digest = before[0]
    tolerance = 1e-12 if dtype == "float64" else 0.05
    for second, taken_up, initial, applied, reset in megatron_world.run(
        read.ranks, "loaded", path=path, cut=read, step=step, directory=tmp_path
    ):
        assert (taken_up, applied) == (digest, 1)
        assert reset == (initial, 0)
        assert initial != digest
        assert worst_relative_error(second.weights, want.weights) <= tolerance
        assert second.in_step


def test_a_state_is_taken_up_bit_for_bit_under_its_own_layout(
    megatron_world: MegatronWorld, models: Models, step_data: Step, tmp_path: Path
) -> None:
    path, step = models("moe"), JobStep(*step_data, FULL)
    cut = Cut(data=2, expert=2, dtype="bfloat16", optimizer=OPTIONS)
    before = megatron_world.run(2, "saved", path=path, cut=cut, step=step, directory=tmp_path)
    after = megatron_world.run(2, "loaded", path=path, cut=cut, step=step, directory=tmp_path)
    for (want, digest), (got, taken_up, *_) in zip(before, after, strict=True):
        assert taken_up == digest
        assert all((got.weights[name] == want.weights[name]).all() for name in want.weights)


def test_a_trainer_is_the_same_whatever_its_layout_and_another_for_another_model(
    megatron_world: MegatronWorld, models: Models
) -> None:
    qwen3 = [
        identity
        for cut in (ONE, TENSOR, PIPELINE)
        for identity, _ in megatron_world.run(
            cut.ranks, "identities", path=models("qwen3"), cut=cut
        )
    ]
    assert len(set(qwen3)) == 1
    ((tied, _),) = megatron_world.run(1, "identities", path=models("qwen3-tied"), cut=ONE)
    assert tied != qwen3[0]


@pytest.mark.parametrize("cut", [ONE, TENSOR, Cut(pipeline=2, data=2)], ids=["1", "t2", "p2d2"])
def test_engines_receive_the_weights_under_their_hugging_face_names(
    megatron_world: MegatronWorld, models: Models, cut: Cut
) -> None:
    path = models("qwen3-tied")
    single = replace(cut, dtype="float32")
    (received, chunks), *_ = megatron_world.run(
        cut.ranks, "sent", path=path, cut=single, chunk_bytes=20_000
    )
    want = dict(hf_model(path).named_parameters())
    assert chunks > 1
    assert received.keys() == want.keys()
    assert all((received[n] == want[n].detach().numpy()).all() for n in want)


@pytest.mark.parametrize("cut", [Cut(tensor=2, data=2), Cut(pipeline=2, data=2)], ids=["t2", "p2"])
def test_the_driver_numbers_the_ranks_as_the_library_does(
    megatron_world: MegatronWorld, models: Models, cut: Cut
) -> None:
    replies = megatron_world.run(cut.ranks, "places", path=models("qwen3"), cut=cut)
    assert replies == [(True, True)] * cut.ranks
