"""Where payloads rest: memory that the service makes and shares with the processes of its node."""
