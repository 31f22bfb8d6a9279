"""Ranks of the torch trainer that share each matrix of a model."""
