"""Copies the metrics of a run into the format of another tool, from the run directory alone.

step_records  the steps that stand, each with its metrics
exporting     CSV and Parquet; trackers, through their own interface
mlflow_sink   a tracking server or its database
"""
