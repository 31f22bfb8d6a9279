"""``offbeat watch``: the page of ``offbeat report``, live, for all runs of a directory.

server      the command; read access; requests, replies and streams
runs        the directories, and when they change
run_lines   the list of runs
"""
