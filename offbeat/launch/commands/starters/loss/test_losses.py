"""Tries the loss before a run does: python test_losses.py, or pytest."""

from types import SimpleNamespace

import torch
from losses import loss

from offbeat.testing import prove_loss


def test_a_gain_beyond_the_clip_has_no_gradient() -> None:
    logprobs_N = torch.tensor([1.5, 1.1]).log().requires_grad_()
    tokens = SimpleNamespace(
        logprobs_N=logprobs_N, old_N=torch.zeros(2), advantages_N=torch.ones(2)
    )
    loss_N, shown = loss(tokens, {"clip": 0.2})
    torch.testing.assert_close(loss_N, torch.tensor([-1.2, -1.1]))
    torch.testing.assert_close(shown["ratio"], torch.tensor([1.5, 1.1]))
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    torch.testing.assert_close(gradient_N, torch.tensor([0.0, -1.1]))


def test_it_is_a_loss_that_a_run_accepts() -> None:
    prove_loss(loss)


if __name__ == "__main__":
    test_a_gain_beyond_the_clip_has_no_gradient()
    test_it_is_a_loss_that_a_run_accepts()
