"""The megatron trainer: Hugging Face decoders over megatron-core, over five axes of parallelism.

Needs the extra ``megatron``. ``plugins.encoder_ranks`` builds on it.

    plugin        the backend as the core finds it
    section       section ``trainer`` with this backend
    checks        whether it knows a model and can divide it, and the bytes of its largest rank
    passes        forward and backward passes of microbatches
    boxed_state   weights in and out, checkpoints, exports (encoder ranks have it, too)
    gradients     gradients of the open step: hooks removed, sums, one reduction
    forward       microbatches through the library's schedules -> log-probabilities, media features
    optimizer     AdamW over the gradient buffers
    model         architecture -> GPTModel
    architecture  Hugging Face config -> sizes, or a refusal
    tower         the vision tower of a first stage, and its gradients
    freezing      weights of a vision tower that are not trained
    mapping       map from elements of a parameter to Hugging Face's tensors         (pure)
    layout        parallel sizes of a world and a rank's place in it                 (pure)
    layout_rules  which sizes fit a model, and sizes near to a recipe that do      (pure)
    token_share   the tokens of a microbatch that a context-parallel rank computes (pure)
    attention     attention by segments with torch's fused kernels
    context       attention and sums over context-parallel ranks
    groups        process groups of a layout
    gathering     whole tensors gathered from all ranks' pieces
    hf_files      boxes read from safetensors
    state         a rank's share of a checkpoint, readable under any layout
    cpu_shim      the library on a CPU, for tests
"""
