"""What a person types. Commands import what they start, so that `--help` loads neither torch nor ray."""
