"""Records and typed failures that cross process boundaries; no behaviour.

The lowest package: every other one may import it; it imports none of them, nor ray, nor torch.
Arrays inside a record are numpy.
"""
