"""The controller: pure state machines wrapped in thin asyncio pumps.

It knows no Ray, no torch and no model; it calls everything outside through the Protocols in
``ports.py``. Start reading at ``controller.py``.
"""
