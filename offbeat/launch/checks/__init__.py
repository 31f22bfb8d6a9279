"""What ``offbeat check`` looks at. A check takes facts and yields findings; it never raises for what it finds."""
