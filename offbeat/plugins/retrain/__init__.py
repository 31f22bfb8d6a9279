"""``offbeat retrain``: runs the trainer alone on the recorded groups of a run."""
