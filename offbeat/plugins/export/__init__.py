"""Copies the metrics of a run into the format of another tool, from the run directory alone.

exporting    the steps that stand, with their metrics, as CSV, Parquet or through a tracker's interface
"""
