"""Launching of runs: driver, cluster, composition of the actors, checks, submit, control."""
