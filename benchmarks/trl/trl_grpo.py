r"""Runs TRL's GRPOTrainer on the task of a recipe; writes one record per step.

    python benchmarks/trl/trl_grpo.py --seconds 120 --until-reward 0.9 runs/bench/trl_4.json
    python benchmarks/trl/trl_grpo.py --task words --model models/smollm2-135m-instruct \
        --max-new-tokens 24 --lr 2e-5 --steps 15 runs/bench/trl_smollm2.json

Runs in the peer's own environment (README.md beside this file), from the repository root. Model, task,
learning rate, batch, clipping and normalisation are those of the recipe; generation is TRL's default
(Hugging Face ``generate``), which is the one that needs no server.

A record: ``t_s`` seconds since training began, ``reward`` mean of the step, ``samples`` and ``tokens``
(prompt and completion) of the step, ``completion_tokens`` of them generated, ``cpu_s`` seconds of CPU of
the step, over all threads.
"""

import argparse
import json
import tempfile
import time
from collections import deque
from pathlib import Path

import torch
from tasks import TASKS, Task
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

REWARD_WINDOW_STEPS = 5
MOST_STEPS = 10_000
"""Prompts are drawn beforehand for as many steps.

The limits given on the command line come earlier.
"""


class StepLog(TrainerCallback):
    """Collects one record per step, and stops training when the goal or the time is reached."""

    def __init__(self, task: Task, seconds: float, until_reward: float | None) -> None:
        self._samples = task.samples_per_step
        self.records: list[dict[str, float]] = []
        self._seconds = seconds
        self._until_reward = until_reward
        self._recent_rewards: deque[float] = deque(maxlen=REWARD_WINDOW_STEPS)
        self._began_s = 0.0
        self._cpu_before_s = 0.0
        self._tokens_before = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the clock."""
        del args, state, control
        self._began_s, self._cpu_before_s = time.perf_counter(), time.process_time()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        """Record the step; TRL counts tokens over the whole run, so take the difference."""
        del args, state
        if logs is None or "reward" not in logs:
            return
        tokens = int(logs["num_tokens"])
        elapsed_s, cpu_s = time.perf_counter() - self._began_s, time.process_time()
        self.records.append(
            {
                "t_s": round(elapsed_s, 4),
                "reward": round(logs["reward"], 6),
                "samples": self._samples,
                "tokens": tokens - self._tokens_before,
                "completion_tokens": round(logs["completions/mean_length"] * self._samples),
                "cpu_s": round(cpu_s - self._cpu_before_s, 4),
            }
        )
        self._tokens_before, self._cpu_before_s = tokens, cpu_s
        self._recent_rewards.append(logs["reward"])
        control.should_training_stop = elapsed_s >= self._seconds or self._goal_reached()

    def _goal_reached(self) -> bool:
        if self._until_reward is None or len(self._recent_rewards) < REWARD_WINDOW_STEPS:
            return False
        return sum(self._recent_rewards) / REWARD_WINDOW_STEPS >= self._until_reward


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure TRL's GRPOTrainer.")
    parser.add_argument("log", type=Path, help="JSON file to write")
    parser.add_argument("--task", choices=TASKS, default="characters")
    parser.add_argument("--model", default="models/tiny-addition")
    parser.add_argument("--max-new-tokens", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="stop after")
    parser.add_argument(
        "--until-reward",
        type=float,
        help=f"stop once the mean reward of {REWARD_WINDOW_STEPS} steps reaches it",
    )
    return parser.parse_args()


def train(arguments: argparse.Namespace, scratch_dir: str) -> list[dict[str, float]]:
    """Run one training; return its records."""
    task = TASKS[arguments.task]()
    log = StepLog(task, arguments.seconds, arguments.until_reward)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=task.reward,
        train_dataset=task.prompts(arguments.steps, arguments.seed),
        callbacks=[log],
        args=GRPOConfig(
            output_dir=scratch_dir,
            seed=arguments.seed,
            use_cpu=True,
            bf16=False,
            max_steps=arguments.steps,
            per_device_train_batch_size=task.samples_per_step,
            num_generations=task.samples_per_prompt,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_completion_length=arguments.max_new_tokens,
            temperature=1.0,
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            warmup_steps=0,
            beta=0.0,  # no KL, no reference model
            epsilon=0.2,
            scale_rewards="group",
            loss_type="dapo",  # the mean over all tokens of the step
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return log.records


def main() -> None:
    """Train, write the records, print where."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch_dir:
        records = train(arguments, scratch_dir)
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    arguments.log.write_text(json.dumps(records))
    print(f"{len(records)} steps in {records[-1]['t_s']:.1f} s: {arguments.log}")


if __name__ == "__main__":
    main()
