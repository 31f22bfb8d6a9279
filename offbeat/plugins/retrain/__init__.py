"""``offbeat retrain``: runs the trainer alone on the recorded groups of a run.

plugin        the command
settings      the recipe of the run with overrides; refuses those that change the data
recording     the applied steps of the run: groups in their order, and results
retraining    trains them again
comparison    compares a step with its record
output        the directory of retrained steps
errors        what cannot be retrained
"""
