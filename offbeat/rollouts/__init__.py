"""Runs the episodes of prompt groups and packs their columns, without Ray.

``worker`` is the environment worker. It is called by a Ray actor, or by a run in one process.
"""
