"""Defines section ``sync`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config


class SyncConfig(Config):
    """Delivery of new weights to the generators."""

    mode: Literal["keep", "drain", "abort_stale"] = "keep"
    """keep: running samples go on with new weights; drain: wait for them first; abort_stale.

    As keep,
    but cancel those that will be too old by the time it is their turn."""

    interval: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two syncs."""

    transport: Literal["object_store", "gloo"] = "object_store"
    """How the bytes travel. object_store: through Ray, in shared memory on one machine; gloo.

    The trainer
    broadcasts to all engines at once, over TCP."""

    chunk_mib: Annotated[float, Field(gt=0)] = 64.0
    """Size of one transfer chunk in MiB; one tensor larger than this is a chunk of its own."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time an engine gets to take the weights before it is left behind as STALE."""

    slowest_mib_s: Annotated[float, Field(gt=0)] = 100.0
    """gloo: MiB/s below which a link counts as broken. A chunk may take its size over this, and
    ``slack_s``."""

    slack_s: Annotated[float, Field(gt=0)] = 5.0
    """gloo: time that any wait for a peer may take, whatever the size."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type in which floating-point weights travel and are served; None.

    As the trainer holds them.
    """

    keep_float32: tuple[str, ...] = ("e_score_correction_bias",)
    """Ends of the names of tensors that ``wire_dtype`` does not round to 16 bits."""

    canary_interval: Annotated[int, Field(ge=0)] = 4
    """Releases from one canary to the next.

    Next-token distributions of the trainer that an engine has to
    reproduce before it serves the release. A trainer's first release has one. 1: each; 0: none."""

    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Nats per token by which the logprobs of engine and trainer may differ on samples drawn under the
    weights being trained; more ends the run. None: a warning from 0.02, with 16-bit weights from 0.1."""
