"""Reads run directories: their layout, their journal, replay and the history of a group."""
