"""Records and typed failures that cross process boundaries, without behaviour.

This is the lowest package. Every other package may import it. It imports no other package of
offbeat, nor ray, nor torch. Arrays inside a record are numpy.
"""
