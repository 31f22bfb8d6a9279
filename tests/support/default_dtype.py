"""torch's default dtype as other threads see it while transformers makes a 16-bit model."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def sixteen_bit_default() -> Generator[None]:
    """Make bfloat16 the dtype of tensors that are created without one, in all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
