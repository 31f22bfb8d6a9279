"""Takes a checked recipe to an exit code.

Driver, cluster, composition of the actors, submit, control.
"""
