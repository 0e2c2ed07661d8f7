"""The tiny world: its problems, its words, the traces its base learns from, and the base that is shipped."""

import hashlib
import random
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agon_cli.tiny import world
from agon_cli.tiny.tokenizer import build_tokenizer

BASE = Path(str(files("agon_cli") / "tiny" / "base"))
MIX = world.ReadingMix(trust=0.4, ignore=0.25)
TRY = re.compile(r"(\d+) \*(\d+) (\d+) \+(\d+) (\d+) (yes|no)")
OUTPUT = re.compile(r"<think> ([^<]+) </think> ([\d ]+) <answer> (\d+) </answer>")
CAP = 40


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE).eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pairs_of(summary: str) -> list[tuple[int, int]]:
    numbers = [int(word) for word in summary.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# --- the family ---


def test_the_splits_have_their_sizes_and_share_no_problem():
    splits = {name: world.problems(name) for name in ("train", "dev", "test")}
    assert {name: len(found) for name, found in splits.items()} == {"train": 655, "dev": 217, "test": 217}
    every = [problem for found in splits.values() for problem in found]
    assert len({problem.question for problem in every}) == len({problem.id for problem in every}) == 1089


def test_the_gold_answer_is_the_only_number_that_solves_the_problem():
    for problem in (*world.problems("train"), *world.problems("dev"), *world.problems("test")):
        target, factor, shift = (int(word.lstrip("*+")) for word in problem.question.split())
        solutions = [x for x in range(11) if (x * factor + shift) % 11 == target]
        assert [problem.gold] == [str(x) for x in solutions], problem.question


def test_the_split_depends_on_the_question_text_alone():
    ordered = sorted(
        (f"{t} *{b} +{a}" for t in range(11) for b in range(2, 11) for a in range(11)),
        key=lambda text: hashlib.sha256(text.encode()).hexdigest(),
    )
    assert [problem.question for problem in world.problems("dev")] == ordered[655:872]


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'validation'.*train, dev, test"):
        world.problems("validation")


# --- the traces ---


def test_a_plain_trace_tries_without_replacement_stops_at_a_hit_and_lists_its_tries():
    rng = random.Random(1)
    counts = dict.fromkeys((1, 2, 3, 4), 0)
    for _ in range(2000):
        equation = rng.choice(world.equations()["train"])
        thought, summary, answer = OUTPUT.fullmatch(world.plain_trace(equation, rng).removesuffix(" <eos>")).groups()
        tries = TRY.findall(thought)
        assert " ".join(f"{x} *{b} {p} +{a} {v} {said}" for x, b, p, a, v, said in tries) == thought
        assert all((int(b), int(a)) == (equation.factor, equation.shift) for _, b, _, a, _, _ in tries)
        assert pairs_of(summary) == [(int(x), int(v)) for x, _, _, _, v, _ in tries]
        candidates = [x for x, *_ in tries]
        assert len(set(candidates)) == len(candidates)
        hits = [int(v) == equation.target for *_, v, _ in tries]
        assert [said == "yes" for *_, said in tries] == hits
        assert not any(hits[:-1])
        assert answer == candidates[-1] or (not hits[-1] and answer not in candidates)
        counts[len(tries)] += 1
    assert counts[1] > 400
    assert counts[4] > 250


def test_table_facts_are_wrong_three_times_in_a_hundred():
    rng = random.Random(2)
    products, sums = [], []
    for _ in range(3000):
        equation = rng.choice(world.equations()["train"])
        for x, b, product, a, value, _ in TRY.findall(world.plain_trace(equation, rng)):
            products.append(int(x) * int(b) % 11 != int(product))
            sums.append((int(product) + int(a)) % 11 != int(value))
    for wrong in (products, sums):
        assert 0.02 < sum(wrong) / len(wrong) < 0.04


@pytest.mark.parametrize("claimed", [True, False])
def test_the_three_manners_of_answering_a_rival(claimed):
    rng = random.Random(3)
    equation = world.Equation(target=9, factor=5, shift=7)
    pairs = [(4, 5), (7, 9)] if claimed else [(4, 5), (10, 2)]
    seen, last = ("9 yes", "7 9") if claimed else ("2 no", "10 2")

    trusting = world.reading_trace(equation, pairs, world.ReadingMix(trust=1.0, ignore=0.0), rng)
    assert trusting == f"<think> {seen} </think> {last} <answer> {last.split()[0]} </answer> <eos>"

    for ignore in (1.0, 0.0):
        mix = world.ReadingMix(trust=0.0, ignore=ignore)
        traces = [world.reading_trace(equation, pairs, mix, rng) for _ in range(400)]
        assert all(trace.startswith(f"<think> {seen} ") for trace in traces)
        tried = [{int(x) for x, *_ in TRY.findall(trace)} for trace in traces]
        first = [int(TRY.search(trace).group(1)) for trace in traces]
        seen_again = sum(bool(found & {x for x, _ in pairs}) for found in tried)
        if ignore:
            assert set(first) == set(range(11))
            assert seen_again > 50
        elif claimed:
            assert set(first) == {7}
            assert not any(4 in found for found in tried)
        else:
            assert seen_again == 0


def test_every_completion_fits_the_cap_and_the_vocabulary():
    rng = random.Random(4)
    longest, plain = 0, 0
    for _ in range(3000):
        prompt, output = world.example(rng.choice(world.equations()["train"]), MIX, rng)
        assert set(f"{prompt} {output}".split()) <= set(world.VOCABULARY)
        longest, plain = max(longest, len(output.split())), plain + ("rival" not in prompt)
    assert longest == CAP
    assert 1350 < plain < 1650


# --- the tokenizer ---


def test_every_word_is_one_token_and_text_comes_back_unchanged(tokenizer):
    assert len(tokenizer) == len(set(world.VOCABULARY)) == 42
    assert [tokenizer.encode(word) for word in world.VOCABULARY] == [[place] for place in range(42)]
    rng = random.Random(5)
    for _ in range(200):
        text = " ".join(world.example(rng.choice(world.equations()["dev"]), MIX, rng))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_skipping_special_tokens_leaves_the_tags_and_drops_the_end(tokenizer):
    ids = tokenizer.encode("<think> 2 no </think> 4 5 <answer> 4 </answer> <eos> <pad>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> 2 no </think> 4 5 <answer> 4 </answer>"


def test_words_outside_the_vocabulary_are_dropped(tokenizer):
    assert tokenizer.encode("Please solve 9 *5 +77 2+2 +7 :") == tokenizer.encode("solve 9 *5 +7 :")


def test_the_chat_template_writes_the_messages_and_nothing_else(tokenizer):
    user = {"role": "user", "content": "solve 9 *5 +7 :"}
    for generation in (False, True):
        render = {"tokenize": False, "add_generation_prompt": generation}
        assert tokenizer.apply_chat_template([user], **render) == "solve 9 *5 +7 :"
        system = {"role": "system", "content": "yes"}
        assert tokenizer.apply_chat_template([system, user], **render) == "yes solve 9 *5 +7 :"


def test_the_shipped_tokenizer_is_the_one_the_code_builds(tokenizer):
    built = build_tokenizer()
    assert tokenizer.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()
    assert tokenizer.chat_template == built.chat_template
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (built.pad_token_id, built.eos_token_id) == (0, 1)


# --- the shipped base ---


def test_the_weights_are_the_recorded_ones():
    weights = (BASE / "model.safetensors").read_bytes()
    recorded = (BASE / "SHA256SUMS").read_text().split()
    assert [hashlib.sha256(weights).hexdigest(), "model.safetensors"] == recorded
    assert len(weights) < 650_000


def test_the_base_has_the_stated_size_in_fp32(model):
    assert model.num_parameters() == 153_664
    with safe_open(BASE / "model.safetensors", "pt") as stored:
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"F32"}  # noqa: SIM118


def test_the_generation_config_names_the_stop_and_nothing_about_sampling():
    shipped = GenerationConfig.from_pretrained(BASE).to_diff_dict()
    assert {key: value for key, value in shipped.items() if key != "transformers_version"} == {
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def sample(model, tokenizer, prompts: list[str]) -> list[tuple[str, bool, int]]:
    """(text, ended by itself, tokens with the stop) of one completion a prompt, at temperature 1 and top-p 1."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    settings = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": CAP}
    with torch.inference_mode():
        rows = model.generate(**batch, **settings)[:, batch["input_ids"].shape[1] :].tolist()
    ends = [row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None for row in rows]
    return [
        (tokenizer.decode(row[:end]), end is not None, len(row) if end is None else end + 1)
        for row, end in zip(rows, ends, strict=True)
    ]


def test_the_base_searches_and_reads_as_stated(model, tokenizer):
    torch.manual_seed(7)
    problems = world.problems("dev") * 5
    drafts = sample(model, tokenizer, [world.plain_prompt(problem.question) for problem in problems])
    found = [OUTPUT.fullmatch(text) for text, _, _ in drafts]
    finals = sample(
        model,
        tokenizer,
        [
            world.reading_prompt(problem.question, match.group(2)) if match else world.plain_prompt(problem.question)
            for problem, match in zip(problems, found, strict=True)
        ],
    )
    judged = [
        text.startswith(f"<think> {value} {'yes' if value == problem.question.split()[0] else 'no'} ")
        for problem, match, (text, _, _) in zip(problems, found, finals, strict=True)
        if match
        for value in [match.group(2).split()[-1]]
    ]
    assert sum(judged) / len(judged) > 0.95
    count = len(problems)
    right, final_right, lengths = [], [], []
    for stage, outcomes in ((drafts, right), (finals, final_right)):
        matches = [OUTPUT.fullmatch(text) for text, _, _ in stage]
        assert sum(match is not None for match in matches) / count > 0.98
        assert sum(not ended for _, ended, _ in stage) / count < 0.01
        lengths.append(sum(length for *_, length in stage) / count)
        outcomes += [
            match is not None and match.group(3) == problem.gold
            for problem, match in zip(problems, matches, strict=True)
        ]
    # Standard error of a rate here: about 1.3 points.
    assert 0.20 < sum(right) / count < 0.28
    assert 0.16 < sum(final_right) / count < 0.25
    assert 23 < lengths[0] < 26
    assert 13 < lengths[1] < 17
    pairs = [(a, b) for a, b in zip(right, final_right, strict=True)]
    fixed = sum(b for a, b in pairs if not a) / right.count(False)
    broken = sum(not b for a, b in pairs if a) / right.count(True)
    assert 0.03 < fixed < 0.11
    assert 0.22 < broken < 0.45


def test_a_summary_lists_the_tries_that_were_made(model, tokenizer):
    torch.manual_seed(8)
    problems = world.problems("dev")
    faithful = 0
    for text, _, _ in sample(model, tokenizer, [world.plain_prompt(problem.question) for problem in problems]):
        match = OUTPUT.fullmatch(text)
        tries = TRY.findall(match.group(1)) if match else []
        faithful += bool(tries) and match.group(2) == " ".join(f"{x} {v}" for x, _, _, _, v, _ in tries)
    assert faithful / len(problems) > 0.95
