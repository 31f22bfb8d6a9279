"""From a checked recipe to an exit code: driver, cluster, composition of the actors, submit, control."""
