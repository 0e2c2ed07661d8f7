"""Every family of models is read by its markers, and a run starts only where a perfect answer gets full marks."""

from __future__ import annotations

import json

import pytest

from agon_cli import assemble, verifiers
from agon_cli.errors import UsageError
from agon_cli.families import FAMILIES, perfect
from agon_cli.prompts import Renderer
from agon_cli.recipe.schema import Format, Recipe
from agon_cli.summaries import read, withhold
from agon_cli.types import Problem
from test_prompts import byte_tokenizer

HARMONY_CONTROLS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")


def turns(start: str, stop: str, opening: str) -> str:
    """A small chat template: each turn between two markers, then what opens the answer."""
    return (
        f"{{% for m in messages %}}{start}{{{{ m['role'] }}}}|{{{{ m['content'] }}}}{stop}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


TEMPLATES = {
    # name: template, extra control tokens
    "plain": (turns("<|im_start|>", "<|im_end|>", "<|im_start|>assistant|"), ()),
    "opens the block": (turns("<|im_start|>", "<|im_end|>", "<|im_start|>assistant|<think>\\n"), ()),
    "writes an empty block": (
        turns("<|im_start|>", "<|im_end|>", "<|im_start|>assistant|<think>\\n\\n</think>\\n\\n"),
        (),
    ),
    "brackets": (turns("[INST]", "[/INST]", ""), ("[THINK]", "[/THINK]")),
    "gemma": (turns("<|turn>", "<turn|>", "<|turn>model|"), ("<|channel>", "<channel|>")),
    "gemma, channel closed": (
        turns("<|turn>", "<turn|>", "<|turn>model|<|channel>thought\\n<channel|>"),
        ("<|channel>", "<channel|>"),
    ),
    "harmony": (turns("<|start|>", "<|end|>", "<|start|>assistant"), HARMONY_CONTROLS),
    "harmony, channel opened": (
        turns("<|start|>", "<|end|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        HARMONY_CONTROLS,
    ),
}
FITS = [
    ("plain", "think"), ("plain", "none"), ("opens the block", "think"), ("writes an empty block", "think"),
    ("brackets", "mistral"), ("gemma", "gemma"), ("gemma, channel closed", "gemma"), ("harmony", "harmony"),
    ("harmony, channel opened", "harmony"),
]  # fmt: skip


def recipe(family, answer=("<answer>", "</answer>"), kind="exact", **more) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"id": "x"},
            "data": {"type": "tiny"},
            "verifier": {"type": kind},
            "prompts": {"plain": "Q: {problem}", "rival": "Q: {problem} {summary}"},
            "format": {"think": family, "answer": answer},
        }
        | more
    )


def renderer(template: str) -> Renderer:
    text, extra = TEMPLATES[template]
    return Renderer(byte_tokenizer(text, extra), recipe("none").prompts, 64)


def start(template: str, chosen: Recipe, problem: Problem | None = None, verifier=None) -> None:
    problem = problem or Problem("p", "1+6?", "7")
    verifier = verifier or verifiers.make(chosen)
    assemble._check_full_marks(chosen, {"A": renderer(template)}, verifier, problem)


def test_a_familys_name_stands_for_its_markers():
    assert Format(think="think") == Format()
    assert Format(think="none").think is None
    assert Format(think="harmony").think == ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
    assert Format.model_validate({"think": ["[[", "]]"]}).think == ("[[", "]]")
    with pytest.raises(ValueError, match="no family of models is called 'thnk': take one of think, mistral"):
        Format(think="thnk")


# What a model of each family writes after its template, by hand, with the shown text and nothing else expected.
WRITTEN = [
    ("think", "", "<think>\nhm\n</think>\n\nso <answer>7</answer>"),
    ("think", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nso <answer>7</answer>"),
    ("think", "<think>\n\n</think>\n\n", "so <answer>7</answer>"),
    ("mistral", "", "[THINK]hm[/THINK]so <answer>7</answer>"),
    ("gemma", "<|turn>model\n", "<|channel>thought\nhm<channel|>so <answer>7</answer>"),
    ("harmony", "<|start|>assistant",
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so <answer>7</answer>"),
    ("harmony", "<|start|>assistant<|channel|>analysis<|message|>",
     "hm<|end|><|start|>assistant<|channel|>final<|message|>so <answer>7</answer>"),
    ("harmony", "<|start|>assistant", "<|channel|>final<|message|>so <answer>7</answer>"),
    ("none", "", "so <answer>7</answer>"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "prefill", "text"), WRITTEN)
def test_reasoning_summary_and_answer_are_found(family, prefill, text):
    fmt = Format(think=family)
    reading = read(text, prefill, "stop", fmt)
    assert (reading.answer, reading.well_formed) == ("7", True)
    assert withhold(reading, fmt, "boxed", str.__eq__) == "so"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("think", "<think> <answer>7</answer>"),
        ("mistral", "[THINK] <answer>7</answer>"),
        ("gemma", "<|channel>thought <answer>7</answer>"),
        ("harmony", "<|channel|>analysis<|message|> <answer>7</answer>"),
        ("harmony", "<|channel|>commentary<|message|> <answer>7</answer>"),
    ],
)
def test_an_answer_inside_the_reasoning_earns_nothing(family, text):
    reading = read(text, "", "stop", Format(think=family))
    assert (reading.region, reading.answer, reading.well_formed) == (None, None, False)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.think])
def test_a_block_that_is_closed_twice_or_opened_again_is_not_well_formed(family):
    opening, closing = FAMILIES[family].think
    fmt = Format(think=family)
    assert read(f"{opening}a{closing}b <answer>7</answer>", "", "stop", fmt).well_formed
    assert not read(f"{opening}a{closing}b{closing}c <answer>7</answer>", "", "stop", fmt).well_formed
    assert read(f"{opening}a{closing}b{opening}c <answer>7</answer>", "", "stop", fmt).region is None


@pytest.mark.parametrize(("template", "family"), FITS)
def test_a_run_starts_where_markers_and_template_agree(template, family):
    start(template, recipe(family))
    start(template, recipe(family, answer=["####", ""]))
    start(template, recipe(family, answer=["final:", ";"]))


@pytest.mark.parametrize(
    ("template", "family", "opened"),
    [
        ("opens the block", "none", "<think>"),
        ("opens the block", "harmony", "<think>"),
        ("harmony, channel opened", "think", "<|channel|>analysis<|message|>"),
    ],
)
def test_a_template_that_opens_a_block_of_another_family_is_refused(template, family, opened):
    """The model would go on reasoning, and all of that would be shown to the rival."""
    with pytest.raises(UsageError) as caught:
        start(template, recipe(family))
    assert f"the template opens a block of reasoning with {opened!r}" in caught.value.message


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (recipe(["<answer>", "</think>"]), "its reasoning never ends"),  # the block's marker is the answer's too
        (recipe(["<think>", "<answer>"]), "it fails the format term"),
        (recipe("think", answer=["<answer>", "a summary"]), "it fails the format term"),
    ],
)
def test_markers_that_get_into_each_others_way_are_refused_with_exit_2(chosen, said):
    with pytest.raises(UsageError, match=said) as caught:
        start("plain", chosen)
    assert caught.value.code == 2
    assert "player A: a perfect completion would not get full marks" in caught.value.message
    assert "format.think" in caught.value.hint


def test_a_template_that_writes_two_blocks_is_refused():
    text = TEMPLATES["plain"][0].replace("assistant|", "assistant|<think></think><think></think>")
    board = Renderer(byte_tokenizer(text), recipe("none").prompts, 64)
    chosen = recipe("think")
    with pytest.raises(UsageError, match="it fails the format term after what the template writes"):
        assemble._check_full_marks(chosen, {"B": board}, verifiers.make(chosen), Problem("p", "?", "7"))


def test_markers_that_the_tokenizer_cannot_write_are_refused():
    from scripted import tokenizer

    board = Renderer(tokenizer(), recipe("none").prompts, 64)
    chosen = recipe("think", answer=["<final>", "</final>"])
    with pytest.raises(UsageError, match="the tokenizer cannot write the marker '<final>'"):
        assemble._check_full_marks(chosen, {"A": board}, verifiers.make(chosen), Problem("p", "?", "7"))


def test_a_gold_that_its_own_verifier_refuses_in_the_answer_tag_is_refused():
    number = recipe("think", kind="number")
    start("plain", number)
    with pytest.raises(UsageError, match=r"its answer is graded unreadable \(not a number\)"):
        start("plain", number, Problem("p", "?", "seven"))


def test_programs_are_tried_on_a_program_in_the_sandbox(monkeypatch):
    chosen = recipe("think", kind="code", data={"type": "jsonl", "path": "x"})
    graded = []

    class Watched(verifiers.ExactVerifier):
        def extract(self, reading):
            return verifiers.code.program_in(reading.answer)

        def grade(self, items):
            graded.extend(program for _, program in items)
            return [verifiers.Verdict("wrong", program, "a broken sandbox") for _, program in items]

    with pytest.raises(UsageError, match=r"its answer is graded wrong \(a broken sandbox\)"):
        start("plain", chosen, verifier=Watched())
    assert graded == ["print(int(input()) * 2)"]
    with pytest.raises(UsageError, match="it fails the format term"):  # a program has more lines than one
        start("plain", recipe("think", ["####", ""], "code", data=chosen.data.model_dump()), verifier=Watched())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_perfect_completion_is_what_a_model_would_write(name):
    text = perfect(FAMILIES[name].think, ("<answer>", "</answer>"), "", "7")
    assert read(text, "", "stop", Format(think=name)).well_formed
    assert json.dumps(text).count("7") == 1
