"""The script of ``with_trl.py`` with offbeat: ``python examples/from_trl/with_offbeat.py [seed]``."""

import itertools
import sys

import offbeat


def correct(completions, answer, **kwargs):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


numbers = itertools.product(range(20), repeat=2)
run = offbeat.train(
    model="models/tiny-addition",
    reward=lambda row, response: correct([response], [row["answer"]])[0],
    prompts=[{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in numbers],
    run_dir="runs/with_offbeat",
    steps=300,
    groups_per_step=16,
    samples_per_group=16,
    max_new_tokens=4,
    learning_rate=3e-4,
    schedule="linear",
    seed=int(sys.argv[1]) if sys.argv[1:] else 0,
)
for part in run.load():
    part.save_pretrained("runs/with_offbeat/model")
