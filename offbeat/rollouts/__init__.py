"""Runs the episodes of prompt groups and packs their columns, without Ray.

``worker`` is the environment worker. A Ray actor calls it, or a run in one process.
"""
