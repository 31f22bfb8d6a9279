"""The server of the queue service: connections, requests, payload memory, snapshots."""
