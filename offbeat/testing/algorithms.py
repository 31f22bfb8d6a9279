"""Proves losses and advantages as a run does when it starts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.algorithms.custom_advantage import CustomFormula, prove_formula


def prove_loss(
    loss: Callable[..., Any], options: Mapping[str, Any] | None = None, **keys: object
) -> None:
    """Prove that a run can use a loss: on random tokens, in any division into calls.

    The loss must be finite, have a gradient and be reproducible. The function must not change its
    inputs, and a token's loss must depend only on its sequence.

    Args:
        loss: The function that ``algorithm.loss.target`` would name.
        options: The loss's second argument.
        **keys: Other keys of ``algorithm.loss``, such as ``reference=True``.

    Raises:
        LossRefused: It lacks one of these properties. The error names the property, two figures and
            a fix.
    """
    from offbeat.algorithms.custom_loss import CustomLoss  # imports torch
    from offbeat.algorithms.loss_proof import prove_loss as prove
    from offbeat.config.sections.loss import CustomLossConfig

    target = find_name(loss)
    config = CustomLossConfig.model_validate({"target": target, "options": options or {}, **keys})
    prove(CustomLoss(loss, target, Path.cwd()), config)


def prove_advantage(advantage: Callable[..., Any]) -> None:
    """Prove that a run can use an advantage estimator: on the rewards of some groups.

    The estimator must return one finite number per reward, be reproducible, and not depend on the
    order of samples.

    Raises:
        AdvantageRefused: It lacks one of these properties.
    """
    prove_formula(CustomFormula(advantage, find_name(advantage), Path.cwd()))


def find_name(function: Callable[..., Any]) -> str:
    """Return the name by which a recipe would find a function or a class."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
