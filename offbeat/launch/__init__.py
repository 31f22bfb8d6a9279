"""Launches runs: session, driver, cluster, composition of the actors, checks, submit, control."""
