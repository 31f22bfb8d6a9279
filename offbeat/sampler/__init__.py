"""Staleness policies: admission, selection and eviction in one object, so they cannot disagree.

Pure: numbers and receipts in, verdicts out. They decide; the ledger records.
"""
