"""A vision tower on separate ranks."""
