"""``offbeat watch``: the page of ``offbeat report``, live, for all runs of a directory.

access    who may read: host, origin, token, cookie       runs     which directories, when they change
server    the command; requests, replies and streams      prometheus  the last record as text
"""
