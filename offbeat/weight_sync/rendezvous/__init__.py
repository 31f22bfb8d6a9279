"""Rendezvous of a run's processes over authenticated sockets, bound to the run's own address.

frames.py        messages that only holders of a shared key can create
store_server.py  a key-value store over TCP that serves only such messages
store.py         its client, a ``torch.distributed.Store``
interface.py     which network interface the sockets of collective libraries are bound to
"""
