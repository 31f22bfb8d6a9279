"""Staleness policies: admission, selection and eviction in one object, so they cannot disagree.

Policies are pure: they turn numbers and receipts into decisions. The ledger records the decisions.
"""
