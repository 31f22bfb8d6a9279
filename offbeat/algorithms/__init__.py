"""From rewards to a gradient: pure functions, each with its formula, its source and its reference test.

``advantages`` is plain Python, because the controller computes advantages from receipts; the losses
need torch and are imported by trainers only.
"""
