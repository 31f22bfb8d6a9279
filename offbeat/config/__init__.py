"""Defines a run's configuration.

Frozen pydantic models, recipes, overrides, and one report of all that is wrong.

Imports pydantic and yaml only; never torch, ray or transformers.
"""
