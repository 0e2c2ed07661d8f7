"""Reading completions and withholding answers: a table of cases, then hostile text."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agon_cli.recipe.schema import Format
from agon_cli.summaries import MASK, leaks, read, withhold

THINK = Format()
BARE = Format(think=None)
OTHER = Format(think=("[[", "]]"), answer=("final:", ";"))


def same(a: str, b: str) -> bool:
    return a == b


def number(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


CASES = [
    # text, prefill, region, answer, well formed
    ("<think> a </think> b <answer> 7 </answer>", "", " b <answer> 7 </answer>", "7", True),
    ("<think>a</think>b<answer>7</answer>\n ", "", "b<answer>7</answer>\n ", "7", True),
    (" a </think> b <answer>7</answer>", "<|assistant|><think>\n", " b <answer>7</answer>", "7", True),
    (" a </think> b <answer>7</answer>", "", " b <answer>7</answer>", "7", True),
    (" b <answer>7</answer>", "<think>\n\n</think>\n\n", "\n\n b <answer>7</answer>", "7", True),
    ("<think>a</think> b <answer>7</answer>", "<think>", " b <answer>7</answer>", "7", False),
    ("<think>a</think> b <answer>7</answer>", "<think>\n</think>", " b <answer>7</answer>", "7", False),
    ("<think>a</think> b <answer>7</answer> c", "", " b <answer>7</answer> c", "7", False),
    ("<think>a</think> b <answer>6</answer><answer>7</answer>", "", None, "7", False),
    ("<think>a</think> b <answer>6</answer> c </answer>", "", None, "6", False),
    ("<think>a</think> b <answer> <answer>7</answer>", "", None, "7", False),
    ("<think>a</think> b <answer></answer>", "", None, None, False),
    ("<think>a</think> b <answer> 7", "", None, None, False),
    ("<think>a</think> b", "", " b", None, False),
    ("<think>a</think> b \\boxed{7}", "", None, "7", False),
    ("<think>a</think> \\boxed{6} b \\boxed{\\frac{1}{2}} c", "", None, "\\frac{1}{2}", False),
    ("<think>a</think> b <answer>\\boxed{7}</answer>", "", None, "7", True),
    ("<think>a</think> b <answer>x = \\boxed{7}</answer>", "", None, "x = \\boxed{7}", True),
    ("<think>a</think> \\boxed{6} <answer>7</answer>", "", None, "7", True),
    ("<think>a</think> \\boxed{7", "", None, None, False),
    ("<think>a</think> \\boxed {7}", "", None, "7", False),
    ("<think>a</think> \\boxed{\\left\\{ 1 \\right.}", "", None, "\\left\\{ 1 \\right.", False),
    ("<think>a</think> \\boxed{\\{1, 2\\}}", "", None, "\\{1, 2\\}", False),
    ("<think> <answer>7</answer> </think> b", "", " b", None, False),
    ("<think> \\boxed{7} </think> b", "", " b", None, False),
    ("<think>a</think> b </think> c <answer>7</answer>", "", " c <answer>7</answer>", "7", False),
    ("<think><think>a</think> b <answer>7</answer>", "", " b <answer>7</answer>", "7", False),
]
NO_REGION = [
    ("", ""),
    ("b <answer>7</answer>", ""),
    ("<think> a <answer>7</answer>", ""),
    ("a \\boxed{7}", "<think>"),
    ("<think>a</think> b <think> again <answer>7</answer>", ""),
]


@pytest.mark.parametrize(("text", "prefill", "region", "answer", "well_formed"), CASES)
def test_a_completion_is_read(text, prefill, region, answer, well_formed):
    reading = read(text, prefill, "stop", THINK)
    assert reading.region is not None
    assert region in (None, reading.region)
    assert (reading.answer, reading.well_formed) == (answer, well_formed)


@pytest.mark.parametrize(("text", "prefill"), NO_REGION)
def test_a_reasoning_block_that_is_not_closed_has_no_answer_and_no_summary(text, prefill):
    reading = read(text, prefill, "stop", THINK)
    assert (reading.region, reading.answer, reading.well_formed) == (None, None, False)
    assert withhold(reading, THINK, "tag", same) is None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", [THINK, BARE])
def test_a_truncated_completion_has_nothing_to_read(case, fmt):
    reading = read(case[0], case[1], "length", fmt)
    assert (reading.region, reading.answer, reading.well_formed) == (None, None, False)


def test_a_model_without_reasoning_block_has_no_block_test():
    reading = read("because <answer>7</answer>", "", "stop", BARE)
    assert (reading.region, reading.answer, reading.well_formed) == ("because <answer>7</answer>", "7", True)
    assert withhold(reading, BARE, "tag", same) == "because"


def test_markers_are_the_recipes_own():
    reading = read("[[ a ]] b final: 7;", "", "stop", OTHER)
    assert (reading.answer, reading.well_formed) == ("7", True)
    assert withhold(reading, OTHER, "boxed", same) == "b"


WITHHELD = [
    # region, tag, boxed, strict
    ("so <answer>7</answer>", "so", "so", "so"),
    ("so <answer>7</answer> indeed", "so  indeed", "so  indeed", "so  indeed"),
    ("so 7, thus <answer>7</answer>", "so 7, thus", "so 7, thus", f"so {MASK}, thus"),
    ("x = 7.0 <answer>7</answer>", "x = 7.0", "x = 7.0", f"x = {MASK}"),
    ("**7** and 17 <answer>7</answer>", "**7** and 17", "**7** and 17", f"{MASK} and 17"),
    ("so $7$ <answer>7</answer>", "so $7$", "so $7$", f"so {MASK}"),
    (
        "so $x = 7$, \\(y=7\\) <answer>7</answer>",
        "so $x = 7$, \\(y=7\\)",
        "so $x = 7$, \\(y=7\\)",
        f"so {MASK}, {MASK}",
    ),
    ("so \\boxed{7} <answer>7</answer>", "so \\boxed{7}", f"so {MASK}", f"so {MASK}"),
    ("a \\boxed{5} b \\fbox{\\frac{1}{2}} c", None, f"a {MASK} b {MASK} c", f"a {MASK} b {MASK} c"),
    ("a \\boxed{7 and more", None, f"a {MASK}", f"a {MASK}"),
    ("a \\boxed{\\} secret} b", None, f"a {MASK} b", f"a {MASK} b"),
    ("a <answer>6</answer> b <answer>7</answer>", "a  b", "a  b", "a  b"),
    ("a <answer>7", "a", "a", "a"),
    ("a </answer> b", "a   b", "a   b", "a   b"),
    ("<answer>7</answer>", None, None, None),
    ("\\boxed{7}", "\\boxed{7}", None, None),
    (" \n ", None, None, None),
    ("7 <answer>7</answer>", "7", "7", None),
]


@pytest.mark.parametrize(("region", "tag", "boxed", "strict"), WITHHELD)
def test_the_answer_is_withheld(region, tag, boxed, strict):
    reading = read(f"<think>t</think>{region}", "", "stop", THINK)
    if tag is not None or boxed is None:
        assert withhold(reading, THINK, "tag", number) == tag
    assert withhold(reading, THINK, "boxed", number) == boxed
    assert withhold(reading, THINK, "strict", number) == strict


def test_leaks_are_spans_equal_to_the_answer():
    assert leaks("so 7 it is", "7", number)
    assert leaks("so $7.0$ it is", "7", number)
    assert leaks("so x=7.", "7", number)
    assert leaks("**7**", "7", number)
    assert leaks("so $x = 7$ it is", "7", number)
    assert leaks("so \\( x = 7 \\) it is", "7", number)
    assert leaks("plan\n```\nprint(1)\nprint(2)\n```", "print(1)\nprint(2)", number), "a program outside its tag"
    assert not leaks("so $x + 7 = 9$ it is", "7", number)
    assert not leaks("so 17 it is", "7", number)
    assert not leaks(None, "7", number)
    assert not leaks("so 7", None, number)


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "\\}", "\\{", "\\", "$", " ", "\n"),
        *("<answer>SECRET</answer>", "\\boxed{SECRET}", "\\fbox{ SECRET }", "<answer>\\boxed{SECRET}</answer>"),
        *("<ans", "wer>", "</ans", "\\box", "ed{", "text", "\x00", "\ud800", "[...]", "<|im_end|>", "é", "\u202e"),
    ]
)


@given(st.lists(PIECES, max_size=14).map("".join), st.sampled_from(["tag", "boxed", "strict"]))
@settings(max_examples=1500, deadline=None)
def test_no_arrangement_of_markers_lets_an_answer_through(region, how):
    reading = read(f"<think></think>{region}", "", "stop", THINK)
    summary = withhold(reading, THINK, how, same)
    if summary is None:
        return
    assert "<answer>" not in summary
    assert "</answer>" not in summary
    if how != "tag":
        assert "SECRET" not in summary
        assert "\\boxed{" not in summary
    if how == "strict" and reading.answer is not None:
        assert not leaks(summary, reading.answer, same)


@given(st.lists(PIECES, max_size=14).map("".join), st.sampled_from(["", "<think>", "<think>\n</think>"]))
@settings(max_examples=800, deadline=None)
def test_the_format_term_is_what_the_method_says(text, prefill):
    reading = read(text, prefill, "stop", THINK)
    whole = prefill + text
    if reading.well_formed:
        assert whole.count("</think>") == 1
        assert whole.count("<think>") <= 1
        assert whole.count("<answer>", whole.index("</think>")) == 1
        assert whole.rstrip().endswith("</answer>")
        assert reading.answer is not None
    if reading.answer is not None:
        assert reading.answer in whole[whole.rindex("</think>") :]


HUGE = [
    *("\\boxed{" * 15_000, "\\boxed{}" * 12_000, "\\boxed{7" * 12_000, "\\boxed" + " " * 100_000, "\\boxed " * 15_000),
    *("<answer>" * 12_000, "</answer>" * 12_000, "<answer></answer>" * 6_000, "<answer>7</answer> " * 5_000),
    *("$" * 100_000, "$a" * 50_000, "\\(" * 50_000, "\\( a" * 25_000, "{" * 100_000, "\x00" * 100_000, "a" * 100_000),
    *("<think>" * 14_000, "</think>" * 12_000, "*" * 100_000, "\\" * 100_000, "\\boxed{\\" * 12_000),
]


@pytest.mark.parametrize("text", HUGE, ids=[text[:12].strip().encode("unicode_escape").decode() for text in HUGE])
def test_a_hundred_kilobytes_of_anything_are_read_in_no_time(text):
    started = time.perf_counter()
    for prefix in ("", "<think></think>", "<think></think>\\boxed{", "<think></think><answer>"):
        for suffix in ("", "}", "<answer>7</answer>", "</think>"):
            reading = read(prefix + text + suffix, "", "stop", THINK)
            for how in ("tag", "boxed", "strict"):
                leaks(withhold(reading, THINK, how, same), reading.answer, same)
    assert time.perf_counter() - started < 16 * 0.5, "half a second a completion"


# ------------------------------------------------------------------------------------------- answers of several tokens


@pytest.mark.parametrize(
    ("answer", "text", "shown"),
    [
        ("(1,2)", "the point is (1, 2), clearly", f"the point is {MASK}, clearly"),
        ("(1, 2)", "x=(1,2) or (1,3)", f"x={MASK} or (1,3)"),
        ("[0,1)", "on [0,1) it falls", f"on {MASK} it falls"),
        ("no solution", "there is No  solution here", f"there is {MASK} here"),
        ("1,000", "1,000 but not 1,000,000 or 21,000 or 3,1,000", f"{MASK} but not 1,000,000 or 21,000 or 3,1,000"),
        ("a b a", "a b a b a", f"{MASK} b a"),
        ("a, b", "a, bc and ca, b", "a, bc and ca, b"),
    ],
)
def test_strict_masks_answers_of_several_tokens_and_the_audit_sees_them(answer, text, shown):
    reading = read(f"{text} <answer>{answer}</answer>", "", "stop", BARE)
    assert withhold(reading, BARE, "strict", same) == shown
    assert leaks(text, answer, same) is (shown != text)
    assert not leaks(shown, answer, same)


def test_a_box_in_a_box_is_opened_and_one_with_more_in_it_is_not():
    nested = {
        "\\boxed{\\boxed{7}}": "7",
        "\\boxed{\\fbox{ \\boxed{7} }}": "7",
        "\\boxed{x = \\boxed{7}}": "x = \\boxed{7}",
    }
    for text, answer in nested.items():
        assert read(text, "", "stop", BARE).answer == answer
        assert read(f"<answer>{text}</answer>", "", "stop", BARE).answer == answer
        assert withhold(read(f"so {text}", "", "stop", BARE), BARE, "boxed", same) == f"so {MASK}"
    assert read("\\boxed{\\boxed{7}\\boxed{8}}", "", "stop", BARE).answer == "\\boxed{7}\\boxed{8}"


def test_a_mask_is_no_answer_that_could_leak():
    assert not leaks(f"so {MASK} it is", MASK, same)


# ------------------------------------------------------------------------------------------------------------ programs


PROGRAM = "n = int(input())\nfor i in range(n):\n    if i % 2:\n        print(i * i)\n"
FENCED = f"```python\n{PROGRAM}```"
ANSWER = f"<answer>\n{FENCED}\n</answer>"
PLANS = [
    # what a draft shows, and the prose that its rival reads
    (f"Square the odd ones.\n{ANSWER}", "Square the odd ones."),
    (f"Square the odd ones.\n{FENCED}", "Square the odd ones."),
    (f"Plan.\n{FENCED}\nDone.\n{ANSWER}", "Plan.\n\nDone."),
    (f"Plan.\n{PROGRAM}\n{ANSWER}", "Plan."),
    (f"Plan.\n{FENCED.replace('python', 'cpp')}\n{ANSWER}", "Plan."),
    (f"Plan.\n```python\n{PROGRAM}\n{ANSWER}", "Plan."),
    (f"Plan. ```python\n{PROGRAM}```\nDone.\n{ANSWER}", "Plan. \nDone."),
    (f"```\n```python\n{PROGRAM}```\nDone.\n{ANSWER}", "Done."),
    (f"Plan.\n~~~\n{PROGRAM}~~~\nDone.\n{ANSWER}", "Plan.\n\nDone."),
    (f"Plan.\n<pre><code>\n{PROGRAM}</code></pre>\nDone.\n{ANSWER}", "Plan.\n\nDone."),
    (f"Plan.\n<CODE>{PROGRAM}", "Plan."),
    ("Plan.\n" + "".join(f"> {line}\n" for line in PROGRAM.split("\n")) + ANSWER, "Plan."),
    ("Plan.\n" + "".join(f"{i}. `{line}`\n" for i, line in enumerate(PROGRAM.split("\n")[:4])) + ANSWER, "Plan."),
    (f"First `n = int(input())`, then `gcd(a, b)`, `dp[i]`.\n{ANSWER}", f"First {MASK}, then `gcd(a, b)`, `dp[i]`."),
    ("Plan.\n#include <iostream>\nusing namespace std;\nint main() {\n  int n;\n  cin >> n;\n  cout << n * 2;\n}\n"
     + ANSWER, "Plan."),
    ("So <answer>```python\nprint(1)\n```</answer> or print(1) it is", f"So  or {MASK} it is"),
    (ANSWER, None),
    (FENCED, None),
    (PROGRAM, None),
]  # fmt: skip


@pytest.mark.parametrize(("region", "plan"), PLANS)
def test_the_plan_is_what_is_left_without_code(region, plan):
    reading = read(region, "", "stop", BARE)
    shown = withhold(reading, BARE, "plan", same)
    assert (shown or "").split() == (plan or "").split()
    assert (shown is None) == (plan is None)
    assert not leaks(shown, PROGRAM, same)


PROSE = """# Idea
Sort the values (ascending), then walk over pairs: if a < b, keep the larger.

1. Read n, then n numbers.
2. For each of them, add it to a heap; pop while the sum is over k.
   - while there are stones left: take two
   - else: the answer is -1
- Complexity: O(n log n)
- Note: overflow is no issue; f(x) = f(x-1) + 1 by induction, so the result is n*(n-1)/2.
"""


def test_prose_with_signs_in_it_stays_prose():
    assert withhold(read(PROSE + ANSWER, "", "stop", BARE), BARE, "plan", same) == PROSE.strip()


def test_plan_and_code_shows_both_without_the_markers():
    reading = read(f"Plan.\n{ANSWER}", "", "stop", BARE)
    shown = withhold(reading, BARE, "plan+code", same)
    assert shown == f"Plan.\n \n{FENCED}"
    assert leaks(shown, PROGRAM, same), "and the leak rate says so"


@pytest.mark.parametrize(
    "shown",
    [
        PROGRAM,
        f"As I said:\n{PROGRAM}.",
        PROGRAM.replace("    ", "\t").replace("\n", "\n\n"),
        "".join(f"> {line}  # why\n" for line in PROGRAM.split("\n")),
        "First n = int(input()), then for i in range(n): and inside if i % 2: finally print(i * i).",
    ],
)
def test_a_program_that_can_be_read_off_is_a_leak(shown):
    assert leaks(shown, PROGRAM, same)
    assert not leaks(shown.replace("print", "show"), PROGRAM, same)


CODE_PIECES = st.sampled_from(
    [
        *("```", "```python", "\n", "~~~", "`", "print(SECRET)", "x = SECRET()", "<code>", "</code>", "<pre>", "> "),
        *("1. ", "    ", "plan", "<answer>", "</answer>", "\\", "'", '"""', "(", "# "),
    ]
)


@given(st.lists(CODE_PIECES, max_size=12).map("".join))
@settings(max_examples=600, deadline=None)
def test_no_arrangement_of_fences_shows_the_answers_program(pieces):
    reading = read(f"{pieces}\n<answer>```python\nprint(SECRET)\n```</answer>", "", "stop", BARE)
    shown = withhold(reading, BARE, "plan", same) or ""
    assert not re.search(r"(?<!\w)print\(SECRET\)", shown)
    assert not leaks(shown, "print(SECRET)", same)
    assert "<answer>" not in shown


CODE_HUGE = [
    *("`" * 100_000, "```\n" * 25_000, "x = (\n" * 16_000, "a\n" * 50_000, "<code" * 20_000, "int a " * 16_000),
    *("f(" * 50_000, "f()\n" * 25_000, "> " * 50_000, "-" * 100_000, "x=1;" * 25_000, "`x`" * 33_000),
    *("\n".join(f"x{i} = {i}" for i in range(8_000)), "\\d = '\\d'\n" * 10_000, "not " * 25_000),
    *("[" * 299 + "\n" + "-" * 298 + "1", "\n".join(["int a" + " a" * 147] * 333), "\n".join(["f(" * 149] * 333)),
]


@pytest.mark.parametrize("text", CODE_HUGE, ids=[ascii(text[:12]) for text in CODE_HUGE])
def test_a_hundred_kilobytes_of_code_are_removed_in_no_time(text):
    started = time.perf_counter()
    for suffix in ("", f"<answer>{text[:50_000]}</answer>"):
        reading = read(text + suffix, "", "stop", BARE)
        leaks(withhold(reading, BARE, "plan", same), reading.answer, same)
    assert time.perf_counter() - started < 2 * 1.5
