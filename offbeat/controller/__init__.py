"""The controller: pure state machines wrapped in thin asyncio pumps.

It uses no Ray, no torch and no model. It calls everything outside through the Protocols in
``ports.py``. Start reading at ``controller.py``.
"""
