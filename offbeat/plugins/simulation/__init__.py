"""The simulator as a command."""
