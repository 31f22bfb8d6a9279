"""Checks of ``offbeat check``. A check receives facts and yields findings. It never raises."""
