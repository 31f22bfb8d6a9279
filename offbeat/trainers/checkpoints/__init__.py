"""Checkpoints of a trainer: written completely or not at all, verified, shared by all ranks."""
