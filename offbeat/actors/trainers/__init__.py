"""The trainers: one folder a backend, and what they share.

split_step            what every backend is: begin, microbatch, finish, and a state to keep
step_guard            which call may come next                                    (pure)
step_sums             what a step adds up over its microbatches and ranks
batches/              prompt groups as padded rows and tensors
dispatch              which rank gets which rows, the same number of microbatches each (pure)
trainer_actor         the Ray actor around it: fences, failures, its own log
checkpoint_store      checkpoints on disk: written whole, found again, kept in order
checkpoint_manifest   what a checkpoint says of itself, and whether that is true
checkpoint_disk       the disk, in six operations
state_files           tensors in files, for checkpoints; model_directory: a model for others
"""
