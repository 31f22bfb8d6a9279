"""The trainers: one folder a backend, and the key discipline they share."""
