"""Runs the episodes of a prompt group and packs its columns. No Ray; an actor calls it."""
