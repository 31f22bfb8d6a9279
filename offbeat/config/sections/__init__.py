"""Holds the sections of a recipe: one file per section, or per two that belong together, named as the first."""
