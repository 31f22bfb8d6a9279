"""Prompt groups between rollouts and training: what exists, what it weighs, where its columns are.

Not to be confused with the PyPI package TransferQueue, whose import is a top-level
``transfer_queue``; this one is ``offbeat.transfer_queue``.
"""
