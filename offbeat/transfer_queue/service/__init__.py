"""The queue as a service of its own: a server around the core, clients of two kinds, two channels.

wire.py      what is said: typed messages in msgpack, no pickle
desk.py      answers messages: the core, the waits, the memory. No I/O but the loop's timers
socket.py    the channel on the node: a Unix socket, for processes of this user
links.py     the client's end of it, blocking and asyncio
producing.py, reading.py   what clients do without asking: payloads into shared memory and out
client.py, sync_client.py  the API
actor.py     the service as a Ray actor, and the channel for clients on other nodes
snapshot.py  index and payloads on disk
"""
