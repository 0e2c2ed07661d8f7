"""A scripted engine and a small real model: a step whose every fact is known before the code under test sees it.

The engine says what a script tells it to, in real token ids of a real tokenizer; the model under it is a random Llama
small enough that a slow reference can recompute every gradient.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agon_cli.recipe.schema import Recipe
from agon_cli.rollout import Arena
from agon_cli.types import Completion, Problem, Prompt, Sampling, Verdict
from reference import Fact, Knobs

torch.set_num_threads(1)

SPECIAL = ["<unk>", "<pad>", "<eos>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
WORDS = [
    *("<think>", "</think>", "<answer>", "</answer>", "solve", "rival", ":", "D", "C", "FAULT", "SLOW"),
    *(str(number) for number in range(11)),
    *(f"q{number}" for number in range(16)),
    *(f"x{number}" for number in range(16)),
    *(f"w{number}" for number in range(20)),
    *(f"\\boxed{{{number}}}" for number in range(11)),
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; `<|end|>` is a second way to stop."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_model(
    folder: Path, *, seed: int = 0, tied: bool = False, layers: int = 2, dropout: float = 0.0, hidden: int = 32
) -> Path:
    """A random Llama, spread widely enough that its tokens have very different probabilities. On a CPU, vLLM needs
    heads of 32: `hidden=128`."""
    tok = tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tok),
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3 * (32 / hidden) ** 0.5,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=tok.convert_tokens_to_ids("<eos>"),
        pad_token_id=tok.convert_tokens_to_ids("<pad>"),
    )
    model = LlamaForCausalLM(config)
    stops = [tok.convert_tokens_to_ids("<eos>"), tok.convert_tokens_to_ids("<|end|>")]
    # A deployment's own habits, none of which may reach our sampler.
    model.generation_config = GenerationConfig(
        eos_token_id=stops, do_sample=True, top_k=3, temperature=0.3, repetition_penalty=1.7
    )
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def make_recipe(folder: Path, method: dict[str, Any] | str = "agon", **sections: Any) -> Recipe:
    """A recipe on the small model: four problems a step, four rollouts a group, adapters of rank 4."""
    given: dict[str, Any] = {
        "method": method,
        "model": {"id": str(folder), "dtype": "float32"},
        "players": {"A": {}, "B": {"noise": 0.05}},
        "lora": {"rank": 4, "alpha": 8.0},
        "data": {"type": "tiny"},
        "verifier": {"type": "exact"},
        "prompts": {"plain": "solve {problem} :", "rival": "solve {problem} rival {summary} :"},
        "summary": {"max_tokens": 24},
        "rollout": {
            "problems": 4,
            "group_size": 4,
            "temperature": 0.7,
            "top_p": 1.0,
            "max_tokens": 24,
            "max_prompt_tokens": 64,
        },
        "optim": {"lr": 1e-2, "micro_batch_tokens": 256},
        "steps": 20,
        "hardware": {"threads": 1},
    }
    for name, values in sections.items():
        if isinstance(values, dict) and name != "players":
            given[name] = given.get(name, {}) | values
        else:
            given[name] = values
    return Recipe.model_validate(given)


def knobs(recipe: Recipe) -> Knobs:
    """The reference's view of a recipe."""
    method = recipe.method
    return Knobs(
        players=method.players,
        exchange=method.exchange,
        opponent=method.opponent,
        reward=method.reward,
        bonus=method.bonus,
        bonus_needs_summary=method.bonus_needs_summary,
        tie_break=method.tie_break,
        format_weight=method.format_weight,
        roles=method.roles,
        group_size=recipe.rollout.group_size,
        temperature=recipe.rollout.temperature,
        denominator=recipe.optim.denominator,
        kl=recipe.optim.kl,
    )


def problem(number: int) -> Problem:
    return Problem(id=f"id-{number}", question=f"q{number}", gold=str(number % 11))


class ScriptedVerifier:
    """Exact text; the answer FAULT breaks the grader itself and SLOW exhausts its limits."""

    def extract(self, reading: Any) -> str | None:
        return reading.answer

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Verdict]:
        status = {"FAULT": "grader_error", "SLOW": "timeout"}
        return [
            Verdict(status.get(answer, "correct" if answer == task.gold else "wrong"), answer) for task, answer in items
        ]

    def equal(self, a: str, b: str) -> bool:
        return a == b

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Line:
    """What the engine will say, and what is true of it by construction. `summary` is None where there is none."""

    text: str
    finish: str
    correct: bool
    format: int
    summary: str | None
    masked: bool = False

    def fact(self) -> Fact:
        length = len(self.text.split()) + (1 if self.finish == "stop" else 0)
        return Fact(self.correct, self.format, length, self.masked, self.summary)


KINDS = (
    *("right", "right", "right", "wrong", "wrong", "wrong", "right_not_last", "right_two_tags", "boxed"),
    *("truncated", "truncated_after_answer", "unclosed", "empty", "empty_wrong", "unreadable", "fault", "slow"),
    *("two_blocks",),
)


def line(kind: str, mark: str, gold: str, fill: int = 3) -> Line:
    """One completion of a kind. `mark` makes its summary unique; `fill` is how long it thinks."""
    bad = "10" if gold != "10" else "9"
    think = f"<think> {' '.join(f'w{i % 20}' for i in range(fill))} </think>"
    forms: dict[str, Line] = {
        "right": Line(f"{think} {mark} <answer> {gold} </answer>", "stop", True, 1, mark),
        "wrong": Line(f"{think} {mark} <answer> {bad} </answer>", "stop", False, 1, mark),
        "right_not_last": Line(f"{think} <answer> {gold} </answer> {mark}", "stop", True, 0, mark),
        "right_two_tags": Line(
            f"{think} {mark} <answer> {bad} </answer> <answer> {gold} </answer>", "stop", True, 0, mark
        ),
        "boxed": Line(f"{think} {mark} \\boxed{{{gold}}}", "stop", True, 0, f"{mark} [...]"),
        "truncated": Line(f"<think> {mark} {' '.join(['w1'] * fill)}", "length", False, 0, None),
        "truncated_after_answer": Line(f"{think} {mark} <answer> {gold} </answer>", "length", False, 0, None),
        "unclosed": Line(f"<think> w3 {mark} <answer> {gold} </answer>", "stop", False, 0, None),
        "empty": Line(f"{think} <answer> {gold} </answer>", "stop", True, 0, None),
        "empty_wrong": Line(f"{think} <answer> {bad} </answer>", "stop", False, 0, None),
        "unreadable": Line(f"{think} {mark}", "stop", False, 0, mark),
        "fault": Line(f"{think} {mark} <answer> FAULT </answer>", "stop", False, 1, mark, masked=True),
        "slow": Line(f"{think} {mark} <answer> SLOW </answer>", "stop", False, 1, mark),
        "two_blocks": Line(f"{think} <think> w2 </think> {mark} <answer> {gold} </answer>", "stop", True, 0, mark),
    }
    return forms[kind]


Script = Callable[[str, str, int], Line]
"""(role, question, index) -> what is said."""


def script_of(step: int, size: int) -> Script:
    """A mixture in which every corner case turns up, and three groups are arranged on purpose.

    By a problem's number modulo 4: 0, all drafts wrong and all challenges right (no signal on either side); 1, mixed
    drafts and all challenges right (only a rival term gives signal); 2 and 3, anything.
    """

    def say(role: str, question: str, index: int) -> Line:
        number = int(question[1:])
        dice = random.Random(f"{step}/{role}/{question}/{index}")
        mark = f"{'D' if role == 'draft' else 'C'} {question} x{index}"
        fill = dice.randrange(1, 6)
        if number % 4 == 0:
            kind = "wrong" if role == "draft" else "right"
        elif number % 4 == 1:
            kind = ("right" if index % 2 else "wrong") if role == "draft" else "right"
        else:
            kind = dice.choice(KINDS)
        return line(kind, mark, str(number % 11), fill)

    return say


@dataclass
class ScriptedEngine:
    """Says what the script says. `roles` names what each call of `sample` is for, in order."""

    tokenizers: dict[str, Any]
    script: Script | None = None
    roles: list[str] = field(default_factory=list)
    seen: list[tuple[str, str, str, int, Prompt, int]] = field(default_factory=list)
    published: list[str] = field(default_factory=list)

    def begin(self, script: Script, roles: Sequence[str]) -> None:
        self.script, self.roles, self.seen = script, list(roles), []

    def publish(self, player: str) -> None:
        self.published.append(player)

    def origins(self, player: str) -> list[str]:
        return ["the script"]

    def rest(self) -> None: ...

    def close(self) -> None: ...

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        role = self.roles.pop(0)
        counts: dict[str, int] = defaultdict(int)
        out = []
        for prompt, row in zip(prompts, seeds, strict=True):
            words = prompt.text.split()
            question = words[words.index("solve") + 1]
            said = []
            for seed in row:
                index = counts[question]
                counts[question] += 1
                self.seen.append((role, player, question, index, prompt, seed))
                assert self.script is not None
                said.append(self.completion(player, self.script(role, question, index)))
            out.append(said)
        return out

    def completion(self, player: str, said: Line) -> Completion:
        """The line in this player's token ids; a line that ends by itself keeps its stop token."""
        tok = self.tokenizers[player]
        ids = tok(said.text, add_special_tokens=False)["input_ids"]
        assert tok.unk_token_id not in ids
        if said.finish == "stop":
            ids = [*ids, tok.eos_token_id]
        return Completion(tuple(ids), tuple(-1.0 for _ in ids), said.finish, said.text)


def arena(recipe: Recipe, policy: Any) -> tuple[Arena, ScriptedEngine]:
    """An arena on a real policy whose engine follows a script."""
    from agon_cli.prompts import Renderer

    engine = ScriptedEngine({name: seat.tokenizer for name, seat in policy.seats.items()})
    renderers = {
        name: Renderer(seat.tokenizer, recipe.prompts, recipe.summary.max_tokens) for name, seat in policy.seats.items()
    }
    return Arena(recipe, engine, renderers, ScriptedVerifier()), engine


def silent(_: str) -> None:
    """A phase observer that does not care."""
