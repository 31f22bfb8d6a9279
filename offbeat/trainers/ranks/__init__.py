"""Ranks of one trainer: process group, collectives, assignment of groups, assembly of a rank."""
