"""Plug-ins of somebody else: offbeat finds them by the entry points in ``pyproject.toml``."""
