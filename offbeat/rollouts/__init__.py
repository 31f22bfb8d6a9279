"""Runs episodes: the group logic needs no Ray; ``actor`` puts it into one."""
