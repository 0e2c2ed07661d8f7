"""Recipes: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agon_cli.errors import Exit, UsageError
from agon_cli.recipe import OF_MEMORY, PRESETS, Recipe, differences, from_resolved, load, locate, resolved, shipped
from agon_cli.recipe.engine import HF, Server
from agon_cli.recipe.explain import keys

ROOT = Path(__file__).resolve().parents[1]
BASE = "model: {id: some/model}\ndata: {type: tiny}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a recipe into an empty working directory and return the name it is called by."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "r.yaml") -> str:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


def refusal(source: str, *overrides: str) -> list[str]:
    """The lines of the error a recipe is refused with."""
    with pytest.raises(UsageError) as caught:
        load(source, overrides)
    assert caught.value.code == Exit.USAGE
    assert caught.value.hint
    return caught.value.message.split("\n")


# --- YAML 1.2 ---------------------------------------------------------------------------------------------------------


def test_an_exponent_without_a_dot_is_a_number(write):
    assert load(write(BASE + "optim: {lr: 1e-5}\n")).optim.lr == 1e-5


def test_words_that_yaml_1_1_took_for_truth_values_stay_text(write):
    text = "model: {id: no}\ndata: {type: jsonl, path: yes, columns: {answer: off}}\n"
    recipe = load(write(text))
    assert (recipe.model.id, recipe.data.path, recipe.data.columns.answer) == ("no", "yes", "off")


def test_dates_and_clock_times_stay_text(write):
    assert load(write("model: {id: 2026-01-31}\ndata: {type: jsonl, path: 12:30}\n")).data.path == "12:30"


def test_leading_zeros_are_decimal(write):
    assert load(write(BASE + "seed: 010\n")).seed == 10


def test_a_byte_order_mark_and_crlf_are_read(write):
    assert load(write(b"\xef\xbb\xbf" + (BASE + "seed: 3\n").replace("\n", "\r\n").encode())).seed == 3


# --- refused, with the line -------------------------------------------------------------------------------------------

REFUSED = [
    ("", "r.yaml: the recipe is empty"),
    ("# only a remark\n", "r.yaml: the recipe is empty"),
    ("[1, 2]\n", "r.yaml: a recipe is a mapping of keys to values (got [1, 2])"),
    ("tiny\n", "r.yaml: a recipe is a mapping of keys to values (got 'tiny')"),
    ("model:\n\tid: x\n", "r.yaml:2: a tab in the indentation; use blanks"),
    (BASE + "seed: 1\nseed: 2\n", "r.yaml:4: seed: written twice (first on line 3)"),
    (BASE + "optim:\n  lr: 1\n  lr: 2\n", "r.yaml:5: optim.lr: written twice (first on line 4)"),
    (BASE + "sede: 1\n", "r.yaml:3: sede: unknown key; did you mean 'seed'?"),
    (BASE + "optim:\n  lrr: 1\n", "r.yaml:4: optim.lrr: unknown key; did you mean 'lr'?"),
    (BASE + "lr: 1e-5\n", "r.yaml:3: lr: unknown key; did you mean 'optim.lr'?"),
    (BASE + "engine: {batch_token: 5}\n", "r.yaml:3: engine.batch_token: unknown key; did you mean 'batch_tokens'?"),
    (BASE + "engine: {x: 5}\n", "r.yaml:3: engine.x: unknown key; known here: type, batch_tokens"),
    (BASE + "engine: {type: [], x: 5}\n", "r.yaml:3: engine.type: must be one of hf, vllm, server (got [])"),
    (BASE + "players:\n  A: {}\n  B:\n    nose: 1\n", "r.yaml:6: players.B.nose: unknown key; did you mean 'noise'?"),
    (
        BASE + "players: {1st: {}, B: {}}\n",
        "r.yaml:3: players.1st: a player's name is a letter, then at most 31 letters",
    ),
    (
        BASE + "engine: {type: server, urls: ['ftp://x']}\n",
        "r.yaml:3: engine.urls.0: must be http:// or https:// and an",
    ),
    (BASE + "engine: {type: server, urls: ['http://me:pw@x']}\n", "and an address, without a user"),
    (
        "model: {id: x}\ndata:\n  type: hub\n  id: y\n  filters:\n    - {column: a, minimun: 3}\n",
        "r.yaml:6: data.filters.0.minimun: unknown key; did you mean 'minimum'?",
    ),
    (
        "model: {id: x}\ndata:\n  type: jsonl\n  path: y\n  columns:\n    anser: z\n",
        "r.yaml:6: data.columns.anser: unknown key; did you mean 'answer'?",
    ),
    ("model: {id: x}\ndata: {type: tiny, path: y}\n", "r.yaml:2: data.path: unknown key; known here: type"),
    (
        "model: {id: x}\ndata: {type: hubb}\n",
        "r.yaml:2: data.type: must be one of tiny, jsonl, json, csv, parquet, saved, hub, reasoning_gym, mix (got",
    ),
    ("model: {id: x}\ndata: {}\n", "r.yaml:2: data.type: required, but missing: one of tiny, jsonl"),
    ("model: {id: x}\n", "r.yaml: data: required, but missing"),
    ("model:\n  dtype: float32\ndata: {type: tiny}\n", "r.yaml:1: model.id: required, but missing"),
    (BASE + "optim: {lr: fast}\n", "r.yaml:3: optim.lr: wants a number (got 'fast')"),
    (BASE + "optim: {lr: '1e-5'}\n", "r.yaml:3: optim.lr: wants a number (got '1e-5'); take off the quotes"),
    (BASE + "method: {bonus_needs_summary: yes}\n", "wants true or false (got 'yes'); write true"),
    (BASE + "steps: 1.5\n", "r.yaml:3: steps: wants an integer (got 1.5)"),
    (BASE + "steps: true\n", "r.yaml:3: steps: wants an integer (got true)"),
    (BASE + "optim:\n", "r.yaml:3: optim: wants a mapping (got null)"),
    (BASE + "lora: {targets: 3}\n", "r.yaml:3: lora.targets: wants text or a list (got 3)"),
    (BASE + "lora: {targets: [3]}\n", "r.yaml:3: lora.targets.0: wants text (got 3); put it in quotes"),
    (BASE + "lora: {targets: (}\n", "r.yaml:3: lora.targets: is no regular expression"),
    (BASE + "format: {think: [a]}\n", "r.yaml:3: format.think: wants a list of two"),
    (BASE + "format: {think: [a, '']}\n", "r.yaml:3: format.think.1: must not be empty"),
    (BASE + "rollout: {group_size: 1}\n", "r.yaml:3: rollout.group_size: must be at least 2 (got 1); an advantage"),
    (BASE + "rollout: {top_p: 1.1}\n", "r.yaml:3: rollout.top_p: must be at most 1 (got 1.1)"),
    (BASE + "rollout: {temperature: 0}\n", "r.yaml:3: rollout.temperature: must be more than 0 (got 0)"),
    (BASE + "optim: {lr: .inf}\n", "r.yaml:3: optim.lr: must be a finite number (got inf)"),
    (BASE + "optim: {lr: .nan}\n", "r.yaml:3: optim.lr: must be a finite number (got nan)"),
    (BASE + "optim: {lr: 1e999}\n", "r.yaml:3: optim.lr: must be a finite number (got inf)"),
    (BASE + "method: argon\n", "r.yaml:3: method.preset: no method is called 'argon'; did you mean 'agon'?"),
    (BASE + "method: {preset: [agon]}\n", "r.yaml:3: method.preset: wants text (got ['agon'])"),
    (BASE + "method: 3\n", "r.yaml:3: method: wants a preset's name or a mapping (got 3)"),
    (BASE + "method: {preset: grpo, reward: margin}\n", "r.yaml:3: method: reward 'margin' needs an opponent"),
    (BASE + "players: {A: {}}\n", "r.yaml:3: players: method 'agon' trains rivals: name at least two players"),
    (BASE + "prompts: {plain: hello}\n", "r.yaml:3: prompts.plain: never shows the problem: write {problem}"),
    (BASE + "prompts: {rival: '{problem}'}\n", "r.yaml:3: prompts.rival: never shows the rival's summary"),
    (BASE + "prompts: {plain: '{problem} {summary}'}\n", "r.yaml:3: prompts.plain: a draft has no summary to read"),
    (BASE + "verifier: {type: reasoning_gym}\n", "r.yaml:3: verifier.type: reasoning_gym scores only problems of data"),
    ("model: !!python/name:os.system x\n", "r.yaml:1: model: tags and %YAML directives are refused"),
    ("model: !!python/object/apply:os.system [id]\n", "r.yaml:1: model: tags and %YAML directives are refused"),
    (BASE + "seed: !!str 5\n", "r.yaml:3: seed: tags and %YAML directives are refused (got !!str)"),
    ("%YAML 1.1\n---\n" + BASE + "seed: no\n", "r.yaml:5: seed: tags and %YAML directives are refused"),
    ("1: x\n", "r.yaml:1: a key must be text (got 1)"),
    ("? [a]\n: x\n", "r.yaml:1: a key must be text (got a list or mapping)"),
    (BASE + "<<: {seed: 1}\n", "r.yaml:3: <<: unknown key; YAML 1.2 has no merge keys"),
    (BASE + "---\nseed: 1\n", "r.yaml:3: not YAML: but found another document"),
    ("model: *x\n", "r.yaml:1: not YAML: found undefined alias"),
    ("model: {id: x\n", "r.yaml:2: not YAML:"),
    ("model: a: b\n", "r.yaml:1: not YAML: mapping values are not allowed here"),
    ("model: " + "[" * 500, "r.yaml:1: nested deeper than 20 levels"),
    ("model: &a [*a]\n", "r.yaml: more than 10,000 values, aliases expanded"),
    ("model: \x07\n", "r.yaml:1: holds a character YAML does not allow (0x0007)"),
    (BASE + "seed: " + "9" * 5000 + "\n", "r.yaml:3: seed: "),
    (b"model: \xff\n", "r.yaml:1: not UTF-8 text (byte 7)"),
    (b"# " + b"x" * 1_000_001, "r.yaml: larger than 1,000,000 bytes"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[str(text)[-30:] for text, _ in REFUSED])
def test_refused_with_its_place_and_a_way_out(write, text, said):
    lines = refusal(write(text))
    assert any(line.startswith(said) or (not said.startswith("r.yaml") and said in line) for line in lines), lines


def test_aliases_that_multiply_are_stopped_early(write):
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert refusal(write("l0: &l0 [a, a]\n" + levels)) == ["r.yaml: more than 10,000 values, aliases expanded"]


def test_an_alias_within_reason_is_read(write):
    recipe = load(write("model: &m {id: x}\nplayers: {A: {}, B: {model: *m}}\ndata: {type: tiny}\n"))
    assert recipe.model_of("B").id == "x"


def test_every_fault_is_reported_at_once_in_the_order_of_the_file(write):
    text = "model:\n  id: 3\n  dtyp: x\ndata: {type: tiny}\nsteps: 0\nsteps: 4\nrollout:\n  group_size: 1\n  top_p: 2\n"
    lines = refusal(write(text), "optim.lr=-1", "seeed=3")
    assert [line.split(": ")[:2] for line in lines] == [
        ["r.yaml:2", "model.id"],
        ["r.yaml:3", "model.dtyp"],
        ["r.yaml:5", "steps"],
        ["r.yaml:6", "steps"],
        ["r.yaml:8", "rollout.group_size"],
        ["r.yaml:9", "rollout.top_p"],
        ["override optim.lr=-1", "optim.lr"],
        ["override seeed=3", "seeed"],
    ]


def test_all_tabbed_lines_are_named(write):
    assert len(refusal(write("model:\n\tid: x\n\tdtype: y\n"))) == 2


def test_a_tab_inside_a_prompt_is_text(write):
    text = BASE + "prompts:\n  plain: |\n    a\n    \tb {problem}\n"
    assert load(write(text)).prompts.plain == "a\n\tb {problem}\n"


def test_hostile_text_reaches_the_terminal_escaped(write):
    lines = refusal(write(BASE + 'steps: "\\e[2Jx"\n"\\e[31mkey": 1\n'), "seed=\x1b[2J")
    assert "\x1b" not in "".join(lines)


def test_thousands_of_faults_are_cut_short(write):
    lines = refusal(write(BASE + "".join(f"k{n}: 1\n" for n in range(3000))))
    assert len(lines) < 50
    assert lines[-1].startswith("… and ")


# --- where recipes are found ------------------------------------------------------------------------------------------


def test_a_missing_recipe_names_the_nearest(write):
    write(BASE, "arithmetic.yaml")
    assert refusal("tny")[0] == "tny: no such recipe; did you mean 'tiny'?"
    assert refusal("arithmetc.yaml")[0] == "arithmetc.yaml: no such recipe; did you mean 'arithmetic.yaml'?"


@pytest.mark.parametrize("source", ["", ".", "/", "a\0b", "x" * 5000, "~nobody-here/x", "/dev/null"])
def test_what_is_no_recipe_file_is_a_usage_error(write, source):
    assert refusal(source)


def test_a_name_finds_the_shipped_recipe_from_anywhere(write):
    assert locate("tiny") == ROOT / "recipes" / "tiny.yaml"
    assert load("tiny").steps == 200


def test_a_file_goes_before_a_shipped_name(write):
    assert load(write(BASE + "seed: 7\n", "tiny")).seed == 7


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails, even for root")
def test_a_file_that_cannot_be_read_is_named():
    assert refusal("/proc/self/mem")[0].startswith("/proc/self/mem: cannot be read")


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_read_numbers_text_lists_and_null():
    recipe = load(
        "tiny",
        ["optim.lr=1e-5", "model.id=no", "lora.targets=[q_proj, v_proj]", "format.think=null", "hardware.threads=2"],
    )
    assert (recipe.optim.lr, recipe.model.id, recipe.format.think) == (1e-5, "no", None)
    assert (recipe.lora.targets, recipe.hardware.threads) == (["q_proj", "v_proj"], 2)


def test_a_prompt_in_an_override_may_hold_yaml_punctuation():
    recipe = load("tiny", ["prompts.plain=Q: {problem} # now :", 'prompts.rival="{problem}\\n{summary}"'])
    assert recipe.prompts.plain == "Q: {problem} # now :"
    assert recipe.prompts.rival == "{problem}\n{summary}"


def test_no_value_is_empty_text():
    assert load("tiny", ["prompts.system="]).prompts.system == ""


def test_a_method_by_name_replaces_the_block_and_a_knob_changes_one(write):
    name = write(BASE + "method: {preset: agon, bonus: 3, tie_break: 0.5}\n")
    assert load(name).method.bonus == 3
    assert load(name, ["method=grpo"]).method == load(write(BASE + "method: grpo\n", "g.yaml")).method
    changed = load(name, ["method.preset=coop"]).method
    assert (changed.reward, changed.bonus) == ("cooperative", 3)


def test_a_knob_can_be_set_on_a_method_given_by_name(write):
    method = load(write(BASE + "method: coop\n"), ["method.reward=competitive"]).method
    assert (method.preset, method.reward) == ("coop", "competitive")


def test_later_overrides_win():
    assert load("tiny", ["seed=1", "seed=2"]).seed == 2


def test_overriding_one_player_keeps_the_others(write):
    name = write(BASE)
    players = load(name, ["players.C.noise=0.1"]).players
    assert {player: values.noise for player, values in players.items()} == {"A": 0.0, "B": 0.005, "C": 0.1}
    assert load("tiny", ["players.B.model={id: other, dtype: float32}"]).model_of("B").id == "other"


def test_an_override_mends_what_the_file_has_wrong(write):
    name = write(BASE + "steps: 0\n")
    assert load(name, ["steps=3"]).steps == 3


def test_an_override_reaches_into_a_list(write):
    name = write("model: {id: x}\ndata: {type: hub, id: y, filters: [{column: a}]}\n")
    assert load(name, ["data.filters.0.minimum=3"]).data.filters[0].minimum == 3
    assert refusal(name, "data.filters.1.minimum=3")[0].endswith("cannot be set: data.filters is a list of 1")


SERVED = ["engine.type=server", "engine.urls=[http://x:1]", "engine.timeout=5"]


@pytest.mark.parametrize("words", permutations(SERVED))
def test_another_type_leaves_behind_what_the_file_wrote_for_its_own(write, words):
    name = write(BASE + "engine: {type: hf, batch_tokens: 5}\n")
    assert load(name, words).engine == Server(type="server", urls=["http://x:1"], timeout=5.0)
    assert load(name, ["engine.type=hf"]).engine.batch_tokens == 5


def test_another_type_of_data_keeps_what_both_have(write):
    name = write("model: {id: x}\ndata: {type: hub, id: y, split: z, columns: {answer: a}, filters: [{column: a}]}\n")
    data = load(name, ["data.type=jsonl", "data.path=p"]).data
    assert (data.path, data.columns.answer, data.filters[0].column) == ("p", "a", "a")
    assert resolved(load(name, ["data.type=tiny"]))["data"] == {"type": "tiny"}
    assert refusal(name, "data.type=jsonl") == ["r.yaml:2: data.path: required, but missing"]


@pytest.mark.parametrize("words", [SERVED, ["engine.type=vllm"], ["engine.type=hf"]])
@pytest.mark.parametrize("name", shipped())
def test_every_engine_can_be_named_on_top_of_a_shipped_recipe(name, words):
    assert load(name, words).engine.type == words[0].partition("=")[2]


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("engine: {type: hf, batch_token: 5}", ["engine.type=vllm"], "r.yaml:3: engine.batch_token: unknown key"),
        ("engine: {type: hf}", ["engine.type=vllm", "engine.batch_tokens=7"], "override engine.batch_tokens=7: engine"),
        ("steps: 3", ["engine={type: hf, batch_tokens: 7}", "engine.type=vllm"], "override engine={type: hf, batch_"),
        ("engine: {batch_tokens: 5}", ["engine.type=vlm"], "override engine.type=vlm: engine.type: must be one of hf,"),
        ("engine: {batch_tokens: 5}", ["engine.type=[]"], "override engine.type=[]: engine.type: must be one of hf,"),
    ],
)
def test_another_type_hides_neither_a_mistake_nor_what_an_override_says(write, text, words, said):
    assert refusal(write(BASE + text + "\n"), *words)[0].startswith(said)


def test_what_an_override_says_within_a_key_of_another_type_is_not_dropped(write):
    name = write("model: {id: x}\ndata: {type: hub, id: y, columns: {answer: a}}\n")
    assert "data.columns: unknown key" in refusal(name, "data.columns.answer=b", "data.type=tiny")[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", "override steps: not of the form key.path=value"),
        ("=3", "override =3: not of the form key.path=value"),
        ("optim..lr=3", "override optim..lr=3: not of the form key.path=value"),
        ("optim.lrr=3", "override optim.lrr=3: optim.lrr: unknown key; did you mean 'lr'?"),
        ("optm.lr=3", "override optm.lr=3: optm: unknown key; did you mean 'optim'?"),
        ("steps.x=3", "override steps.x=3: steps.x: cannot be set: steps is not a mapping"),
        ("method=argon", "override method=argon: method.preset: no method is called 'argon'; did you mean 'agon'?"),
        ("rollout.group_size=1", "override rollout.group_size=1: rollout.group_size: must be at least 2 (got 1)"),
        ("lora.targets=[a, {]", "override lora.targets=[a, {]: lora.targets: not YAML:"),
        ("seed=!!python/object x", "override seed=!!python/object x: seed: wants an integer"),
        ("data={type: tiny, a: 1, a: 2}", "override data={type: tiny, a: 1, a: 2}: a: written twice"),
        ("model.id=\udcff", "override model.id=\\udcff: not UTF-8 text"),
    ],
)
def test_a_bad_override_is_named(override, said):
    assert refusal("tiny", override)[0].startswith(said)


# --- presets and resolved recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_knobs_and_each_can_be_set_alone(preset):
    method = load("tiny", [f"method={preset}"]).method
    assert {knob: getattr(method, knob) for knob in PRESETS[preset]} == PRESETS[preset]
    for knob in ("bonus", "tie_break", "format_weight"):
        assert getattr(load("tiny", [f"method={preset}", f"method.{knob}=0.125"]).method, knob) == 0.125


@pytest.mark.parametrize("name", shipped())
def test_a_resolved_recipe_comes_back_through_json(name):
    recipe = load(name)
    assert from_resolved(json.loads(json.dumps(resolved(recipe)))) == recipe


def test_a_value_of_the_default_engine_needs_no_type():
    """What the plan and running out of memory advise can be typed as it is."""
    assert load("tiny", ["engine.batch_tokens=500"]).engine == HF(type="hf", batch_tokens=500)


def test_values_of_memory_are_keys_of_a_recipe_and_can_be_left_out_of_a_comparison():
    assert {".".join(path) for path in keys()} >= OF_MEMORY
    words = ["optim.micro_batch_tokens=7", "optim.checkpointing=true", "engine.batch_tokens=9"]
    old, new = resolved(load("tiny")), resolved(load("tiny", [*words, "seed=4"]))
    assert differences(old, new, OF_MEMORY) == ["seed: 0 -> 4"]
    assert len(differences(old, new)) == 4
    old, new = (resolved(load("tiny", ["engine.type=vllm", f"engine.memory={share}"])) for share in (0.5, 0.4))
    assert differences(old, new, OF_MEMORY) == []


def test_a_resolved_recipe_holds_every_key(write):
    tree = resolved(load(write(BASE)))
    for path in keys():
        here = tree
        if "*" in path or path[0] in ("data", "engine"):  # each of those is one of several kinds
            continue
        for part in path:
            here = here[part]


def test_a_damaged_resolved_recipe_is_refused():
    values = resolved(load("tiny"))
    values["optim"]["lr"] = "fast"
    with pytest.raises(UsageError, match=r"recipe\.resolved\.json: optim\.lr: wants a number"):
        from_resolved(values)


def test_differences_name_the_key_and_both_values():
    old = resolved(load("tiny"))
    assert differences(old, old) == []
    new = resolved(load("tiny", ["optim.lr=0.002", "method.bonus=2", "data={type: jsonl, path: x}", "seed=1"]))
    lines = differences(old, new)
    assert "optim.lr: 0.001 -> 0.002" in lines
    assert "method.bonus: 1.0 -> 2.0" in lines
    assert 'data.type: "tiny" -> "jsonl"' in lines
    assert 'data.path: (absent) -> "x"' in lines
    assert "seed: 0 -> 1" in lines


def test_differences_of_long_text_show_where_it_differs():
    long = "x" * 200
    old = resolved(load("tiny", [f"prompts.system={long}a"]))
    new = resolved(load("tiny", [f"prompts.system={long}b"]))
    assert 'xa"' in differences(old, new)[0]
    assert 'xb"' in differences(old, new)[0]


def test_the_order_of_the_players_is_a_difference():
    old, new = (resolved(load("tiny", [f"players={{{order}}}"])) for order in ("A: {}, B: {}", "B: {}, A: {}"))
    assert differences(old, new) == ["players: order A, B -> B, A"]


def test_a_recipe_cannot_be_changed_after_loading():
    recipe = load("tiny")
    with pytest.raises(ValueError, match="frozen"):
        recipe.optim.lr = 1.0


# --- anything at all --------------------------------------------------------------------------------------------------

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("agon")
_KEYS = st.sampled_from(sorted({part for path in keys() for part in path} | {"A", "B"})) | st.text(max_size=4)
_TREES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(_KEYS, _TREES, max_size=6), override=st.none() | st.tuples(_KEYS, _SCALARS))
def test_any_values_give_a_recipe_or_a_usage_error(tmp_path, tree, override):
    path = tmp_path / "any.yaml"
    path.write_text(json.dumps({"model": {"id": "x"}, "data": {"type": "tiny"}} | tree), encoding="utf-8")
    try:
        recipe = load(str(path), [] if override is None else [f"{override[0]}={override[1]}"])
    except UsageError as error:
        recipe, said = None, error.message
    else:
        said = ""
    assert isinstance(recipe, Recipe) or said
    assert said.replace("\n", "").isprintable()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60) | st.text(alphabet="ab: -[]{}&*!|>'\"\n\t#%@`?,1e.", max_size=40).map(str.encode))
def test_any_bytes_give_a_usage_error(tmp_path, raw):
    path = tmp_path / "any.yaml"
    path.write_bytes(raw)
    with pytest.raises(UsageError):
        load(str(path))


# --- speed and documentation ------------------------------------------------------------------------------------------


def test_loading_a_recipe_is_fast_and_imports_nothing_heavy():
    program = (
        "import sys; from agon_cli.recipe import load; load('tiny'); "
        "sys.exit(bool({'torch', 'transformers', 'peft', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 1.0, spent  # a slow and busy machine included; what is heavy takes seconds


def test_every_key_is_documented():
    def undocumented(section, path=()):
        for name, field in section.model_fields.items():
            inner = list(pages.sections(field.annotation))
            if not field.description and not inner and name != "type":
                yield ".".join((*path, name))
            for part in inner:
                yield from undocumented(part, (*path, name))

    pages = _pages()
    assert list(undocumented(Recipe)) == []


def test_the_generated_pages_are_not_stale():
    assert _pages().main(["--check"]) == 0


def test_a_stale_page_is_noticed_and_written_again(tmp_path, monkeypatch, capsys):
    pages = _pages()
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: {"recipe-reference.md": pages.recipe_page()})
    assert pages.main(["--check"]) == 1
    assert "run make docs" in capsys.readouterr().err
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0


def test_every_exit_code_is_documented():
    assert set(_pages().EXITS) == set(Exit)


def _pages():
    """scripts/reference.py as a module."""
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
