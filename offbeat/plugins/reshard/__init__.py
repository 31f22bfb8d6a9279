"""Transport in which each trainer rank sends the regions that it holds, over a wire."""
