"""A vision tower on ranks of its own: who holds what, and the features and gradients between them."""
