"""Runs the episodes of prompt groups and packs their columns, without Ray.

``worker`` is the environment worker; a Ray actor or a run in one process calls it.
"""
