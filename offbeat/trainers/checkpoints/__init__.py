"""Checkpoints of a trainer: written whole or not at all, verified, shared by all ranks."""
