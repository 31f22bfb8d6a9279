"""Proofs that a user's own tests call."""

from collections.abc import Sequence
from typing import Any

import pytest

from offbeat.algorithms.custom_advantage import AdvantageRefused
from offbeat.algorithms.custom_loss import LossRefused
from offbeat.testing import prove_advantage, prove_loss


def surrogate(tokens: Any, options: Any) -> Any:
    return -(tokens.logprobs_N - tokens.old_N).exp() * tokens.advantages_N * options.get("scale", 1)


def mean_over_the_call(tokens: Any, options: Any) -> Any:
    return surrogate(tokens, options) - tokens.advantages_N.mean() * tokens.logprobs_N


def to_the_reference(tokens: Any, options: Any) -> Any:
    return options["beta"] * (tokens.logprobs_N - tokens.reference_N)


def test_a_loss_is_proved_as_a_run_proves_it() -> None:
    prove_loss(surrogate, {"scale": 2.0})
    with pytest.raises(LossRefused, match=r"mean_over_the_call.*a call per sequence"):
        prove_loss(mean_over_the_call)


def test_a_loss_is_proved_with_the_keys_of_its_recipe() -> None:
    prove_loss(to_the_reference, {"beta": 0.1}, reference=True)
    with pytest.raises(LossRefused, match="it raised"):
        prove_loss(to_the_reference, {"beta": 0.1})


def centred(rewards: Sequence[float]) -> list[float]:
    return [each - sum(rewards) / len(rewards) for each in rewards]


def by_place(rewards: Sequence[float]) -> list[float]:
    return [each * place for place, each in enumerate(rewards)]


def test_an_advantage_is_proved_as_a_run_proves_it() -> None:
    prove_advantage(centred)
    with pytest.raises(AdvantageRefused, match=r"by_place.*opposite order"):
        prove_advantage(by_place)
