"""The very controller of a real run, on a virtual clock, among fakes with seeded faults.

An episode is one run; its records are what the fake actors wrote themselves. The auditor reads them
and the journal, nothing else.
"""
