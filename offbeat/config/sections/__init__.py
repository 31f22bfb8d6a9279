"""Holds the sections of a recipe: one file per section, named as the section is."""
