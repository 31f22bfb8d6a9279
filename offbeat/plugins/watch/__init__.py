"""``offbeat watch``: the page of ``offbeat report``, live, for all runs of a directory.

server      the command; who may read; requests, replies and streams
runs        which directories, when they change
"""
