"""A run with encoder ranks beside megatron-core that is cut: bit for bit one that was not."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_grid_cases import on_grid, step_of
from parity_cases import TOKENS
from parity_cases import MegatronCut as Cut
from world import World

from tests.support.grid_steps import Families

SEQUENCE, DATA = Cut(tensor=2, sequence=True), Cut(data=2)


@pytest.mark.parametrize(
    ("cut", "encoders", "dtype"),
    [
        (SEQUENCE, 1, "float64"),
        (DATA, 2, "float64"),
        (replace(SEQUENCE, encoder_tensor=2), 1, "float64"),
        (SEQUENCE, 1, "bfloat16"),
    ],
    ids=["tp2 + 1", "dp2 + 2", "tp2 + tp2", "tp2 + 1 in bfloat16"],
)
def test_a_run_that_is_cut_goes_on_in_the_same_grid_bit_for_bit(
    world: World, families: Families, tmp_path: Path, cut: Cut, encoders: int, dtype: str
) -> None:
    """Two further steps: moments and float32 masters that were lost would show in the weights."""
    at = replace(cut, dtype=dtype)
    given = {"path": families("idefics3"), "step": JobStep.of(step_of((1, 2, 0, 1)), TOKENS)}

    def digests(count: int, load: Path | None = None, save: Path | None = None) -> list[str]:
        asked = {"count": count, "load": load, "save": save}
        answers = on_grid(world, "megatron_grid_resume_jobs:taken", at, encoders, **given, **asked)
        assert {tuple(each) for each in answers} == {tuple(answers[0])}
        return answers[0]

    undisturbed, saved = digests(4), tmp_path / "state"
    assert len(set(undisturbed)) == 5
    saved.mkdir()
    assert digests(2, save=saved) == undisturbed[:3]
    assert digests(2, load=saved) == undisturbed[2:]
