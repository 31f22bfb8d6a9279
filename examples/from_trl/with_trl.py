"""Learn sums with TRL's ``GRPOTrainer``: ``python examples/from_trl/with_trl.py [seed]``."""

import itertools
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def correct(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


numbers = itertools.product(range(20), repeat=2)
dataset = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in numbers])
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("models/tiny-addition", dtype=torch.float32),
    processing_class=AutoTokenizer.from_pretrained("models/tiny-addition"),
    reward_funcs=correct,
    train_dataset=dataset,
    args=GRPOConfig(
        output_dir="runs/with_trl",
        max_steps=300,
        per_device_train_batch_size=256,
        num_generations=16,
        max_completion_length=4,
        learning_rate=3e-4,
        seed=int(sys.argv[1]) if sys.argv[1:] else 0,
        logging_steps=1,
        bf16=False,
        report_to=[],
    ),
)
trainer.train()
trainer.save_model("runs/with_trl/model")
