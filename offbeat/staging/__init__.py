"""Copies a model directory to local disks: manifest, plan, copy and watchdog; no Ray.

Nothing of a model is executed or loaded: files are read as bytes.
"""
