"""Passes of tiny models."""

import pytest
import torch

from offbeat.models.tiny_model import compute_in_one_thread


def test_threads_come_back_after_a_pass_in_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with compute_in_one_thread():
            within = torch.get_num_threads()
        with pytest.raises(ValueError, match="refused"), compute_in_one_thread():
            raise ValueError("refused")
        assert (within, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)
