"""Holds the sections of a recipe: one file per section, or per two that belong together, named as the first.

The shortest ones are in ``config/run.py``.
"""
