"""A kind of engine for offbeat."""
