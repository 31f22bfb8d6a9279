"""Sends a release by what it changes: the option ``sync.delta``."""
