"""Sends only the changes of a release: the option ``sync.delta``."""
