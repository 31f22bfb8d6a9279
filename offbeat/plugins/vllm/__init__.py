"""Engines of vLLM."""
