"""The queue as a service of its own: a server around the core, clients of two kinds, two channels.

client.py, sync_client.py  the API; lease.py is what a claim gives
conversation.py  what a client does about each request: payloads into memory and out, calls between
wire.py      what is said: typed messages in msgpack, no pickle
links.py     the client's end of the socket, blocking and asyncio; ray_links.py, that of Ray calls
socket.py    the service's end: a Unix socket, for processes of this user
actor.py     the service as a Ray actor, which is the other channel
desk.py      answers messages: the core, the waits, the memory. No I/O but the loop's timers
memory.py    whose each payload's memory is, and who still views it
saving.py    index and payloads on disk
house.py     all of the service, put together
"""
