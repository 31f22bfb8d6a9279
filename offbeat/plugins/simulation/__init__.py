"""Runs the production controller on a virtual clock, with fake actors and seeded faults.

An episode is one run; its records are written by the fake actors. The auditor reads the records and
the journal, nothing else.
"""
