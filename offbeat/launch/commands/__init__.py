"""The command line.

Commands import what they start, so that `--help` loads neither torch nor ray.
"""
