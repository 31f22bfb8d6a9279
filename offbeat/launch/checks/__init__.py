"""Checks of ``offbeat check``. A check takes facts and yields findings; it does not raise."""
