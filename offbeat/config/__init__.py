"""Defines a run's configuration.

Frozen pydantic models, recipes, overrides, and one report of all problems.

Imports only pydantic and yaml; never torch, ray or transformers.
"""
