"""The megatron trainer: Hugging Face decoders over megatron-core, tensor x pipeline x data x expert.

Needs the extra ``megatron``; nothing outside this room imports it.

    split_step    MegatronTrainer: the step of one rank, its state, weights in and out
    gradients     the open step: hooks taken away, sums, the one reduction
    forward       microbatches through the library's schedules -> log-probabilities
    microbatches  rows of a chunk, cut alike on all ranks
    optimizer     AdamW over the gradient buffers
    sharded_optimizer   the same, dealt over data-parallel ranks by the library: on CUDA
    parts         what a trainer is put together from
    model         architecture -> GPTModel
    layers        what its layers are built from
    architecture  Hugging Face config -> sizes, or a refusal
    mapping       where every element of a parameter is in Hugging Face's tensors    (pure)
    layout        the cut of a world and a rank's place in it                        (pure)
    groups        its process groups
    gathering     whole tensors out of all ranks' pieces
    hf_files      boxes out of safetensors; hf_directory: a directory others load
    state         a rank's share of a checkpoint, to be read under any layout
    vocabulary    log-probabilities from logits dealt over tensor-parallel ranks
    actor         the Ray actor of a rank
    cpu_shim      the library on a CPU, for tests
"""
