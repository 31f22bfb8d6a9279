"""Floating-point operations of a decoder's passes, from its sizes. Pure."""

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.trainers.flops import PER_DIMENSION, PER_WEIGHT, ModelFlops


def architecture_flops(architecture: Architecture) -> ModelFlops | None:
    """Return the FLOPs of the model by the count of ``trainers/flops.py``; None with a vision tower.

    ``6 W tokens + 6 V H places + 12 L heads head_dim pairs`` (PaLM, arXiv:2204.02311, appendix B), W the
    weights that a token is multiplied with: attention and MLP of every layer; of a layer of experts those
    that a token is sent to, the one that all tokens pass with its gate, and the router.

    Legend: H hidden, L layers, V vocabulary.
    """
    a = architecture
    if a.tower:
        return None
    attention = 2 * a.hidden * a.head_dim * (a.heads + a.groups)
    dense = 3 * a.hidden * a.intermediate
    gate = a.hidden if a.shared_intermediate and a.shared_gate else 0
    active = a.expert_intermediate * a.experts_per_token + a.shared_intermediate
    sparse = 3 * a.hidden * active + a.experts * a.hidden + gate
    layers_of_experts = len(a.expert_layers)
    weights = (
        a.layers * attention + (a.layers - layers_of_experts) * dense + layers_of_experts * sparse
    )
    return ModelFlops(
        token=PER_WEIGHT * weights,
        place=PER_WEIGHT * a.vocabulary * a.hidden,
        pair=2 * PER_DIMENSION * a.layers * a.heads * a.head_dim,
    )
