"""Access to the run directory from processes on several machines. No Ray."""
