"""The trainers: one folder a backend, and what they share.

split_step            what every backend is: begin, microbatch, finish, and a state to keep
step_guard            which call may come next                                    (pure)
step_sums             what a step adds up over its microbatches and ranks
batches/              prompt groups as padded rows and tensors
dispatch              which rank gets which rows, the same number of microbatches each (pure)
trainer_actor         the Ray actor around it: fences, failures, its own log
rank_parts            what a rank's actor is put together from
expert_names          the experts of a layer apart or together, with or without a gate
receiver_names        which of these names the engines of a run load, proved before the first step
checkpoint_store      checkpoints on disk: written whole, found again, kept in order
checkpoint_manifest   what a checkpoint says of itself, and whether that is true
checkpoint_disk       the disk, in six operations
rank_checkpoints      the store in the hands of all ranks; shared_work: who reads and writes what
memory                the most memory a rank held in each phase of a step
state_files           tensors in files, for checkpoints; model_directory: a model for others
"""
