"""The user's loss as a rank loads it: imported, compared with the run's digest, proved."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from offbeat.algorithms.custom_loss import CustomLoss, LossRefused
from offbeat.algorithms.losses import LOSSES
from offbeat.config.by_value import give, pack
from offbeat.environments.inputs import LOSS, InputChanged, source_digest
from offbeat.fakes.trainer import make_stub_rank
from offbeat.trainers.losses import load_losses
from offbeat.trainers.ranks.assembly import rank_options
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.spec import TrainerSpec
from tests.support.recipes import make_config

MINE = """
def loss(tokens, options):
    return -(tokens.logprobs_N - tokens.old_N).exp() * tokens.advantages_N * options["scale"]

def averaged(tokens, options):
    return loss(tokens, options).mean()

number = 3
"""
_names = count()


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A module of the user's in ``tmp_path``, under a name that no other test imports."""
    name = f"my_losses_{next(_names)}"
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


def spec(target: str, folder: Path, **more: Any) -> TrainerSpec:
    loss = {"name": "custom", "target": target, "options": {"scale": 2.0}}
    config = make_config(algorithm={"loss": loss})
    return TrainerSpec(config, str(folder), working_dir=str(folder), **more)


def test_a_rank_has_the_users_loss_next_to_those_of_the_package(
    module: str, tmp_path: Path
) -> None:
    losses = rank_options(spec(f"{module}:loss", tmp_path), SingleRank()).get("losses", {})
    assert losses.keys() == {*LOSSES, "custom"}
    assert isinstance(losses["custom"], CustomLoss)


def test_a_rank_without_one_has_those_of_the_package() -> None:
    config = make_config()
    assert load_losses(TrainerSpec(config, "run")) is LOSSES


@pytest.mark.parametrize("load", [load_losses, lambda spec: make_stub_rank(spec, SingleRank())])
def test_a_loss_that_is_not_one_per_token_is_refused_in_a_dry_run_too(
    module: str, tmp_path: Path, load: Callable[[TrainerSpec], object]
) -> None:
    with pytest.raises(LossRefused, match=rf"target={module}:averaged: the loss has shape \[\]"):
        load(spec(f"{module}:averaged", tmp_path))
    load(spec(f"{module}:loss", tmp_path))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("absent", "has no 'absent'"), ("number", "has no 'number' that can be called, but a int")],
)
def test_a_target_that_leads_nowhere_is_refused(
    module: str, tmp_path: Path, name: str, problem: str
) -> None:
    with pytest.raises(LossRefused) as caught:
        load_losses(spec(f"{module}:{name}", tmp_path))
    assert problem in str(caught.value) and "Name it module:function" in str(caught.value)


def test_code_that_changed_since_the_run_began_is_refused(module: str, tmp_path: Path) -> None:
    target = f"{module}:loss"
    digest = source_digest(target, tmp_path)
    assert digest is not None
    load_losses(spec(target, tmp_path, inputs={LOSS: digest}))
    with (tmp_path / f"{module}.py").open("a") as source:
        source.write("# another\n")
    with pytest.raises(InputChanged, match=r"algorithm\.loss\.target"):
        load_losses(spec(target, tmp_path, inputs={LOSS: digest}))


def test_a_loss_by_value_is_unpacked_by_the_rank() -> None:
    scale = 3.0

    def by_value(tokens: Any, options: Any) -> Any:
        return -tokens.logprobs_N * tokens.advantages_N * scale

    target = give(by_value)
    assert "custom" in load_losses(spec(target, Path.cwd(), values=pack([target])))
    unknown = "offbeat.by_value:loss-000000000000"
    with pytest.raises(LossRefused, match=r"this process does not have it\. It was given by value"):
        load_losses(spec(unknown, Path.cwd()))
