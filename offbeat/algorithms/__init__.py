"""Pure functions from rewards to a loss, each with its formula, source and reference test.

``advantages`` is plain Python, because the controller computes advantages from receipts. The losses
need torch, and only trainers import them.
"""
