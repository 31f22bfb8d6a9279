"""The torch trainer: any Hugging Face causal LM, cut over ranks by FSDP2 or whole on one.

choose         trainer and weight source of a rank, as the recipe asks for
split_step     TorchTrainer: builds a trainer from its parts
parts          which of its parts a plug-in replaces
loading        the model of a directory: read, proved, cut over the ranks
passes         forward and backward passes of microbatches
state          weights and optimizer on disk, exported, and as they were first
forward        rows -> log-probabilities of the wanted tokens
logprobs       log-probabilities from logits, with a lean backward
freezing       parameters that are not trained
optimizer      AdamW, clipping, master weights
sharding       weights and gradients cut over the ranks
rank_mesh      the axes of the ranks: data, tensor
tensor_*       matrices divided over tensor ranks, and proofs that those compute one step
sharded_state  a state on disk, each rank its part
recompute      layers that are computed again in backward
model          load, and facts of a model
saving         export to a Hugging Face directory, file by file
flops          floating-point operations of a model's passes
"""

from offbeat.trainers.torch.split_step import TorchTrainer

__all__ = ["TorchTrainer"]
