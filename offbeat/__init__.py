"""Asynchronous reinforcement learning for language models: one controller, nothing lost, nothing stale.

Start reading at ``ARCHITECTURE.md``. Importing this package loads nothing else.
"""

__version__ = "0.1.0"
