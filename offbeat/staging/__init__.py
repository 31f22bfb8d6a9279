"""Copies a model directory to local disks, on every node: ``offbeat stage``. Loads neither Ray nor torch.

Nothing of a model is executed or loaded: files are read as bytes. The actor of a node is
``actors.staging_actor``, the command ``launch.stage``.

manifest, plan      the files with their digests; what a node has to copy of them (pure)
outcome             one per node, and their table (pure)
source, hub_model   where a model comes from: a directory, the hub's cache
copying             whole files into the directory of this node, each renamed at its end
progress, watchdog  bytes handled; who stands still is abandoned and named
thread_job          work in a thread that the watchdog can leave behind
"""
