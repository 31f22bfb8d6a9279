"""A run in one process, without Ray: the controller's ports over threads."""
