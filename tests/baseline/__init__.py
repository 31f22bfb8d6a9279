"""What the product does, recorded before a rebuild, and compared after each of its commits."""
