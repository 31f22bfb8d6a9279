"""Contains the checks of ``offbeat check``. A check takes facts and yields findings.

It never raises for what it finds.
"""
