"""Inference engines, and the code that runs an engine in its actor process."""
