"""Storage of payloads in memory that the service shares with the processes of its node."""
