"""Inference engines, and the code that drives one inside its actor process."""
