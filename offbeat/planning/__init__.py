"""Plans for runs that do not exist yet; nothing here starts a process."""
