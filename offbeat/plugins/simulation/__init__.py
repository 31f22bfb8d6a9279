"""Runs the production controller on a virtual clock, with fake actors and seeded faults.

An episode is one run. The fake actors write its records. The auditor reads only the records and
the journal.
"""
