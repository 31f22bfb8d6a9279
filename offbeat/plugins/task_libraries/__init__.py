"""Libraries of tasks as environments: reasoning-gym and verifiers."""
