"""Copies the metrics of a run into the format of another tool, only from the run directory.

exporting    valid steps with their metrics, as CSV, Parquet or through a tracker's interface
"""
