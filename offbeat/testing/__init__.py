"""Proofs of plug-ins and of user code, for the tests of their authors.

If something is wrong, a proof raises the error with which a run would refuse to start, or would
end.
"""

from offbeat.testing.algorithms import prove_advantage, prove_loss
from offbeat.testing.engines import EngineRefused, prove_engine
from offbeat.testing.environments import EnvironmentRefused, prove_environment
from offbeat.testing.samplers import SamplerRefused, prove_sampler
from offbeat.testing.trackers import TrackerRefused, prove_tracker

__all__ = [
    "EngineRefused",
    "EnvironmentRefused",
    "SamplerRefused",
    "TrackerRefused",
    "prove_advantage",
    "prove_engine",
    "prove_environment",
    "prove_loss",
    "prove_sampler",
    "prove_tracker",
]
