"""The command line.

Commands import their modules when called, so that `--help` loads neither torch nor ray.
"""
