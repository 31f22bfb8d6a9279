"""``offbeat watch``: the page of ``offbeat report``, live, for all runs of a directory.

access    who may read: host, origin, token, cookie       runs     which directories, when they change
server    requests and replies; streams of changes        prometheus  the last record as text
serve     the command                                     connections  how many are open
"""
