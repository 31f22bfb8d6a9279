"""Ranks of one trainer: entry, process group, collectives, assignment of groups, assembly of a rank."""
