"""The peer's side of W1 and W2: TRL's GRPOTrainer. Prints one line of JSON.

Needs torch, transformers, peft, trl and datasets, not agon; the model is an ordinary checkpoint folder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

from workloads import (
    ALPHA,
    GRPO,
    LR,
    RANK,
    TARGETS,
    Grpo,
    Laps,
    machine,
    peak_rss_mib,
    print_line,
    questions,
    reward,
    work_of,
)


def settings(work: Grpo, steps: int, folder: str, dtype: str) -> Any:
    """The workload in TRL's words; what is not named stays at TRL's default."""
    import torch
    from trl import GRPOConfig

    rows = work.prompts * work.completions
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work.backward_rows,
        gradient_accumulation_steps=rows // work.backward_rows,
        num_generations=work.completions,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens} if work.forced else None,
        temperature=1.0,
        top_p=1.0,
        beta=0.0,
        learning_rate=LR,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": dtype},
        seed=0,
    )


def measure(workload: str, work: Grpo, model: str, steps: int, warmup: int, dense: bool, dtype: str) -> dict[str, Any]:
    """Figures of `steps` steps after `warmup` uncounted ones."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer, __version__

    laps = Laps(warmup)

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            laps.end()

    def rewards(completions: list[Any], gold: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        laps.tokens.append(sum(map(len, completion_ids)))  # called once a step, with all of its completions
        texts = [completion[0]["content"] for completion in completions]
        return [reward(text, right, i, dense) for i, (text, right) in enumerate(zip(texts, gold, strict=True))]

    rows = [{"prompt": [{"role": "user", "content": asked}], "gold": gold} for asked, gold in questions()]
    with tempfile.TemporaryDirectory() as folder:
        config = settings(work, steps + warmup, folder, dtype)
        lora = LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list(rows),
            peft_config=lora,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[EndOfStep()],
        )
        trainer.train()
    about = {
        "workload": workload,
        "new_tokens": work.new_tokens,
        "side": f"trl {__version__}",
        "dense": dense,
        "dtype": dtype,
        "backward_rows": work.backward_rows,
        "loss": config.loss_type,
    }
    return about | laps.figures() | {"peak_rss_mib": peak_rss_mib()} | machine()


def main(words: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=GRPO, default="w1")
    parser.add_argument("--steps", type=int, default=3, choices=range(1, 1000), metavar="N")
    parser.add_argument("--warmup", type=int, default=1, choices=range(1, 10), metavar="N")
    parser.add_argument("--model-dir", required=True, help="the model's folder, as agon_grpo.py --prepare prints it")
    parser.add_argument("--dense", action="store_true", help="rewards from a hash: every row has an advantage")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, metavar="N", help="new tokens of a completion; default: the workload's")
    parser.add_argument("--rows", type=int, metavar="N", help="of one backward pass; default: the workload's")
    given = parser.parse_args(words)
    work = work_of(given.workload, given.tokens, given.rows)
    print_line(measure(given.workload, work, given.model_dir, given.steps, given.warmup, given.dense, given.dtype))


if __name__ == "__main__":
    main()
