"""A user's module that cannot be imported."""

raise ImportError("no module named grader")
