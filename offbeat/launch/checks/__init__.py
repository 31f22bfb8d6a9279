"""Checks of ``offbeat check``. A check receives facts and yields findings. It does not raise."""
