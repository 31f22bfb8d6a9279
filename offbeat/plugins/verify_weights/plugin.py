"""``offbeat verify-weights`` as a command."""

from offbeat.plugins.verify_weights.commands import COMMANDS

__all__ = ["COMMANDS"]
