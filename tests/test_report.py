"""The page and tables of a document: complete, inert, byte for byte the same; a run folder as a document."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agon_cli import report
from agon_cli.console.comparison import show_comparison
from agon_cli.document import FORMAT, Document
from agon_cli.errors import Exit, ResourceError, UsageError
from agon_cli.report import stored, tables, wording
from agon_cli.report.figures import Strokes, forest, framed, smooth
from agon_cli.report.labels import Labels
from agon_cli.report.page import OUTCOMES, answering, filters, page, strip, trainings
from agon_cli.report.svg import canvas
from commands import agon
from compared import made_up
from documents import HOSTILE, METHODS, document

FILES = ["page.html", "table.csv", "table.md", "table.tex"]
VOID = {"meta", "link", "input", "br", "img"}


class Outline(HTMLParser):
    """What a browser would make of a page: its elements, whether they nest, and the text in each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements[tag] += 1
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements[tag] += 1
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag != "style")


@pytest.fixture(scope="module")
def drawn() -> str:
    return page(document())


@pytest.fixture(scope="module")
def outline(drawn: str) -> Outline:
    return Outline(drawn)


# --- files ------------------------------------------------------------------------------------------------------------


def test_equal_documents_give_equal_bytes(tmp_path: Path) -> None:
    """Also in another process, whose sets iterate in another order, and from the JSON that a comparison leaves."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert [path.name for path in report.write(first, document())] == [
        "table.md",
        "table.csv",
        "table.tex",
        "page.html",
    ]
    (tmp_path / "comparison.json").write_text(json.dumps(document()))
    program = (
        "import sys; from pathlib import Path; from agon_cli import report; from agon_cli.report import stored\n"
        "report.write(Path(sys.argv[2]), stored.read(Path(sys.argv[1])))"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "comparison.json"), str(second)]
    subprocess.run(words, check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(report.__file__).parents[2])})
    assert sorted(path.name for path in first.iterdir()) == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(tmp_path, document())
    before = {name: (tmp_path / name).read_bytes() for name in FILES}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    other = document()
    other["title"] = "another"
    with pytest.raises(ResourceError, match="disk full"):
        report.write(tmp_path, other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(UsageError, match="cannot be written"):
        report.write(tmp_path / "nowhere", document())


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_runs_nothing_and_asks_for_nothing(drawn: str, outline: Outline) -> None:
    assert outline.elements["script"] == 0
    assert (
        outline.elements["iframe"] + outline.elements["img"] + outline.elements["base"] + outline.elements["form"] == 0
    )
    policy = next(a["content"] for tag, a in outline.attributes if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    for tag, attributes in outline.attributes:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "{http://www.w3.org/1999/xlink}href", "xlink:href", "action", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, value)
    style = "".join(text for tag, text in outline.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    assert set(re.findall(r"url\(([^)]*)\)", drawn)) == {
        f"#{one}" for one in set(re.findall(r"url\(#([^)]*)\)", drawn))
    }


def test_ids_are_unique_and_every_reference_has_one(outline: Outline) -> None:
    ids = [a["id"] for _, a in outline.attributes if "id" in a]
    assert len(ids) == len(set(ids))
    wanted = [a[key] for _, a in outline.attributes for key in ("aria-labelledby", "for") if key in a]
    wanted += [a["href"][1:] for _, a in outline.attributes if (a.get("href") or "").startswith("#")]  # type: ignore[index]
    assert len(wanted) > 20
    assert set(wanted) <= set(ids)


def test_headings_go_down_one_level_at_a_time(drawn: str, outline: Outline) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", drawn)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(a.get("aria-label") for tag, a in outline.attributes if tag == "svg" and a.get("role") == "img")
    assert all(a.get("scope") for tag, a in outline.attributes if tag == "th")


def test_every_part_of_the_document_is_on_the_page_in_its_order(outline: Outline) -> None:
    found, text = document(), outline.text()
    for sentence in [*found["verdict"], *found["notes"], found["command"], *(one["why"] for one in found["gates"])]:
        assert sentence in text
    for arm in found["arms"]:
        assert arm["name"] in text
        assert arm["label"] in text
    order = [a["id"] for tag, a in outline.attributes if tag == "section"]
    assert order == [
        *("arms", "contrasts", "curves", "lengths", "drafts", "exchange", "costs", "samples", "notes", "provenance")
    ]


def test_sections_without_data_are_left_out() -> None:
    bare = document()
    for name in ("contrasts", "budgets", "curves", "exchanges", "costs", "samples", "gates", "notes", "verdict"):
        bare[name] = []  # type: ignore[literal-required]
    bare["arms"] = [arm | {"table": None, "rates": {}} for arm in bare["arms"][:1]]  # type: ignore[misc]
    outline = Outline(page(bare))
    assert [a["id"] for tag, a in outline.attributes if tag == "section"] == ["arms", "provenance"]
    assert {a["href"] for tag, a in outline.attributes if tag == "a"} == {"#arms", "#provenance"}
    bare["arms"] = []
    assert [a["id"] for tag, a in Outline(page(bare)).attributes if tag == "section"] == ["provenance"]


def test_figures_nobody_measured_are_dashes() -> None:
    found = document()
    arm = found["arms"][0]
    arm["accuracy"]["value"] = None
    arm["truncated"] = None
    found["contrasts"][0]["difference"]["value"] = None
    moment = dict.fromkeys(found["exchanges"][0]["end"], None)
    found["exchanges"] = [{"method": "agon", "start": moment | {"fix": 0.5}, "end": moment}]  # type: ignore[typeddict-item]
    text = Outline(page(found)).text()
    assert not re.search(r"None(?! of these)", text)
    assert not re.search(r"\bnan\b", text)
    assert "50.0 % →" in text
    assert "Groups revived" not in text, "a measure that nobody took is left out"


def test_what_a_model_writes_is_text_and_nothing_in_it_is_hidden(drawn: str, outline: Outline) -> None:
    shown = "".join(text for tag, text in outline.texts if tag == "pre")
    assert "<script>window.ran = true" in shown
    assert "</style></pre></details></main><!--" in shown
    assert "{{ 7 * 7 }} {% raw %} &lt;b&gt;" in shown
    assert "⟨ESC⟩[31mred⟨ESC⟩[0m nul ⟨NUL⟩ bell ⟨BEL⟩ bidi ⟨U+202E⟩abc⟨U+2066⟩" in shown
    assert "soft⟨U+00AD⟩hyphen zero⟨U+200B⟩width ⟨U+D800⟩ ⟨U+2028⟩ end" in shown
    assert "unbroken" * 400 in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\ud800-\udfff\ufeff]", drawn)


def test_hostile_text_is_inert_wherever_it_stands() -> None:
    found: Any = document()
    evil = "\"'><script>x</script>$\\frac{" + HOSTILE[:300]
    found["title"] = found["command"] = evil
    found["verdict"] = found["notes"] = [evil]
    found["arms"][0]["label"] = found["arms"][1]["method"] = evil
    found["arms"][0]["name"] = found["contrasts"][0]["left"] = found["budgets"][0]["name"] = evil
    found["contrasts"][1]["sentence"] = found["contrasts"][1]["test"] = evil
    found["curves"][0]["method"] = found["exchanges"][0]["method"] = found["costs"][0]["arm"] = evil
    found["costs"][0]["training_seconds"] = {evil: 1.0}
    found["arms"][0]["seeds"][0] |= {"direction": evil, "dev": {evil: 0.5}, "directions": {evil: 0.5}}
    sample = found["samples"][1]
    sample["arms"][evil], sample["outcome"][evil] = sample["arms"]["agon"], "fix"
    sample["arms"]["agon"]["final"] |= {"player": evil, "verdict": evil, "extracted": evil, "summary": evil}
    sample |= {"gold": evil, "question": "", "problem_id": evil}
    sample["outcome"]["coop"] = evil
    found["provenance"], found["recipe"] = {evil: {evil: [evil]}}, {evil: evil}
    found["gates"] = [{"text": evil, "met": False, "why": evil}]
    outline = Outline(page(found))
    assert outline.elements["script"] == 0
    assert outline.text().count("<script>x</script>") > 20
    assert not [a for _, a in outline.attributes if any(name.startswith("on") for name in a)]
    for text in (tables.markdown(found), tables.comma_separated(found), tables.latex(found)):
        assert "\x1b" not in text
        assert "\x00" not in text
        text.encode()


def test_a_choice_of_samples_hides_exactly_the_others() -> None:
    """The style rules, read as a browser reads them, against the outcomes."""
    found = document()["samples"]
    made = filters(found, "coop")
    assert made["methods"] == ["agon", "coop", "grpo"]
    assert made["chosen"] == 1
    rules = str(made["rules"]).splitlines()
    for place, method in enumerate(made["methods"]):
        for outcome in OUTCOMES:
            head = f"#samples:has(#by-{place}:checked):has(#show-{outcome}:checked) "
            mine = [rule.removeprefix(head) for rule in rules if rule.startswith(head)]
            assert f".sample:not(.m{place}-{outcome}) {{ display: none }}" in mine
            nobody = not any(sample["outcome"][method] == outcome for sample in found)
            assert (".nothing { display: block }" in mine) == nobody
    assert made["counts"] == {name: sum(name in s["outcome"].values() for s in found) for name in OUTCOMES}


def test_the_strip_takes_in_every_interval() -> None:
    arms = document()["arms"]
    low, high = strip(arms)
    assert all(low <= arm["accuracy"]["low"] <= arm["accuracy"]["high"] <= high for arm in arms)
    assert (low, high) == (0.1, 0.6)
    assert strip([]) == (0.0, 1.0)


def test_every_training_is_one_row_and_names_its_arms() -> None:
    found = document()
    heads, rows = trainings(found["costs"])
    trained = {arm["name"] for arm in found["arms"] if arm["trained"]}
    named = [name for arms, _ in rows for name in arms]
    assert len(named) == len(set(named))
    assert set(named) == trained
    assert [arms[0] for arms, _ in rows] == [*(name for name in METHODS if name in trained - {"grpo"}), "shuffled"]
    assert ["grpo_two_pass", "grpo", "grpo vote@1.8", "grpo claim@2"] in [arms for arms, _ in rows]
    assert rows[0][1][heads.index("time: draft")] == "1 min 01 s"
    assert rows[0][1][heads.index("time in all")] == "4 min 03 s"


def test_columns_without_a_figure_are_left_out_of_the_costs() -> None:
    costs = document()["costs"]
    assert answering(costs)[0] == ["draft", "prefill", "answer"]
    costs[0]["inference_seconds"] = {"verify": 0.05, "draft": 0.25, "answer": 0.5}
    costs[0]["inference"]["peak_bytes"] = 6.5e8
    heads, rows = answering(costs)
    assert heads[3:] == ["peak", "time: draft", "time: answer", "time: verify", "time in all"]
    assert rows[0][1][3:] == ["0.65 GB", "0.25 s", "0.5 s", "0.05 s", "0.8 s"]
    assert rows[1][1][3:] == ["–"] * 5
    for cost in costs:
        if cost["training"] is not None:
            cost["training"] = {"drafted": 0.0, "prefilled": 1.0, "answered": 2.0}
            cost["training_seconds"] = None
    assert trainings(costs)[0] == ["prefilled", "answered"]
    assert trainings([cost for cost in costs if cost["training"] is None]) == ([], [])


def test_one_pass_has_no_draft_in_any_table() -> None:
    found = document()
    place = next(n for n, arm in enumerate(found["arms"]) if arm["name"] == "grpo")
    for text in (tables.markdown(found), tables.latex(found).replace("--", "–").replace(" & ", " | ")):
        row = next(line for line in text.splitlines() if re.match(r"(\| )?grpo \|", line))
        assert "] | – | 5 | 34 | 34 |" in row
    text = Outline(page(found)).text()
    assert re.search(r"one player, one pass\s+36\.7\[33\.3, 40\.1\]\s+–\s+5\s+34\s+34\s", text)
    assert answering(found["costs"])[1][place] == (["grpo"], ["–", "5", "34"])


def test_the_page_of_a_run_speaks_of_its_directions(run: Path) -> None:
    from agon_cli.report.run import document as document_of

    found = document_of(run)
    assert "same test problem as every direction answered it" in page(found)
    for arm in found["arms"]:
        arm["table"] = None
    assert "same test problem as every player answered it" in page(found)
    assert "same test problem as every method answered it" in page(document())


# --- figures ----------------------------------------------------------------------------------------------------------


def test_every_method_has_a_stroke_of_its_own_and_the_main_one_the_accent() -> None:
    strokes = Strokes("agon")
    names = ["grpo", *METHODS, *(f"variant {n}" for n in range(10))]
    drawn = {(strokes[name].colour, str(strokes[name].dash), strokes[name].marker) for name in names}
    assert len(drawn) == len(set(names))
    assert strokes["agon"].width > strokes["grpo"].width
    assert [strokes[name] for name in names] == [strokes[name] for name in names]


def test_the_forest_plot_tells_every_difference_to_those_who_cannot_see_it() -> None:
    contrasts = document()["contrasts"]
    label = re.search(r'aria-label="([^"]*)"', str(forest(contrasts, 340)))
    assert label is not None
    for contrast in contrasts:
        assert (
            f"{contrast['left']} − {contrast['right']}: {wording.points(contrast['difference']['value'])}" in label[1]
        )


def test_smooth_is_the_mean_of_the_last_ten() -> None:
    values = [float(n % 7) for n in range(40)]
    twin = []
    for place in range(len(values)):
        window = values[: place + 1][-10:]
        twin.append(sum(window) / len(window))
    assert smooth(values) == pytest.approx(twin)


def test_labels_of_close_points_do_not_overlap() -> None:
    dice = random.Random(3)
    arms = [f"grpo_two_pass {n}" for n in range(18)]
    with canvas(450, 340, (42, 46, 16, 16)) as (_, axes):
        spots = [(dice.uniform(0.4, 0.6), dice.uniform(0.3, 0.7)) for _ in arms]
        axes.set(xlim=(0, 1), ylim=(0, 1))
        place = Labels(axes, spots, [[(0.1, 0.2), (0.9, 0.3)]])
        for (x, y), name in zip(spots, arms, strict=True):
            place(x, y, name, "#010101")
        frame = axes.bbox
    boxes = place.placed
    assert len(boxes) == len(arms)
    points = [axes.transData.transform(spot) for spot in spots]
    for n, a in enumerate(boxes):
        assert not [
            b for b in boxes[n + 1 :] if min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])
        ]
        assert not [(x, y) for x, y in points if a[0] < x < a[2] and a[1] < y < a[3]]
        assert frame.x0 <= a[0] < a[2] <= frame.x1 + 8


def test_every_method_and_every_arm_of_equal_tokens_is_drawn_by_its_tokens() -> None:
    """Also one of a family that is drawn as a line, and one without a family."""
    found = document()
    drawn = page(found)
    panel = re.search(r'aria-label="Accuracy against generated tokens[^"]*".*?</svg>', drawn, re.DOTALL)
    assert panel is not None
    texts = Counter(re.findall(r">([^<>\n]+)</text>", panel[0]))
    for arm in found["arms"]:
        assert texts[arm["name"]] == (arm["kind"] in ("method", "equal_tokens")), arm["name"]
    found["arms"] = [arm for arm in found["arms"] if arm["kind"] != "equal_tokens"]
    assert ">grpo vote, k=4</text>" in page(found), "a line without such an arm has a name at its end"


def test_a_wide_interval_runs_out_of_the_frame_and_a_narrow_one_does_not() -> None:
    values = [20.0, 30.0, 50.0]
    low, high = framed(values, [18.0, 22.0, 29.0, 31.0, 48.0, 53.0], 6.0)
    assert low < 18.0
    assert 53.0 < high < 60.0
    low, high = framed(values, [-300.0, 400.0, 29.0, 31.0, 48.0, 53.0], 6.0)
    assert 10.0 < low < 20.0
    assert 50.0 < high < 60.0
    assert framed([7.0], [7.0], 0.0) == pytest.approx((6.94, 7.06))
    assert framed([], [], 3.0)[0] < framed([], [], 3.0)[1]


def test_an_interval_beyond_the_forest_plot_ends_in_an_arrow() -> None:
    contrasts = document()["contrasts"]
    narrow = str(forest(contrasts, 340)).count("<use ")
    contrasts[2]["difference"] |= {"low": -3.0, "high": 3.0}
    assert str(forest(contrasts, 340)).count("<use ") == narrow + 2


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (wording.percent(0.4837), "48.4"), (wording.percent(None), "–"), (wording.percent(math.nan), "–"),
        (wording.points(-0.027), "−2.7"), (wording.points(0.0), "0.0"), (wording.points(-0.0001), "0.0"),
        (wording.fixed(12345.6), "12,346"), (wording.fixed(-1.5, 1), "−1.5"),
        (wording.fixed(-0.004, 2), "0.00"), (wording.fixed(0.0), "0"), (wording.compact(950), "950"),
        (wording.compact(12_300), "12.3 k"), (wording.compact(999_900), "1 M"), (wording.compact(4.56e6), "4.56 M"),
        (wording.duration(0.214), "0.21 s"), (wording.duration(190), "3 min 10 s"),
        (wording.duration(7500), "2 h 05 min"), (wording.probability(0.0004), "< 0.001"),
        (wording.probability(0.0426), "0.043"), (wording.gigabytes(6.78e8), "0.68 GB"),
    ],
)  # fmt: skip
def test_figures_are_worded(told: str, said: str) -> None:
    assert told == said


# --- tables -----------------------------------------------------------------------------------------------------------


def test_the_csv_holds_every_arm_in_full() -> None:
    found = document()
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated(found))))
    assert [row["arm"] for row in rows] == [arm["name"] for arm in found["arms"]]
    for row, arm in zip(rows, found["arms"], strict=True):
        assert float(row["accuracy"]) == arm["accuracy"]["value"]
        assert float(row["generated_tokens"]) == arm["tokens"]["generated"]
        assert row["fix"] == ("" if arm["rates"].get("fix") is None else str(arm["rates"]["fix"]))
    found["arms"][0]["name"] = '=HYPERLINK("http://example.invalid")'
    assert next(csv.DictReader(io.StringIO(tables.comma_separated(found))))["arm"].startswith("'=")


def test_the_markdown_table_has_its_columns_whatever_a_name_holds() -> None:
    found = document()
    found["arms"][0]["name"] = "a|b\n| c | [x](javascript:1) <b>*_`"
    found["notes"] = ["[x]: http://example.invalid"]
    text = tables.markdown(found)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows]
    assert cells == [10] * (2 + len(found["arms"])) + [6] * (2 + len(found["contrasts"]))
    assert "](" not in text
    assert "- [x]\\: http" in text
    assert "<b>" not in text.replace("\\<b\\>", "")


def test_latex_is_escaped_and_its_rows_are_whole() -> None:
    found = document()
    found["arms"][0]["name"] = '[50\\% & _x^2~{$#}"'
    text = tables.latex(found)
    assert r"{}[50\textbackslash{}\% \& \_x\textasciicircum{}2\textasciitilde{}\{\$\#\}'' & 50.0" in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\end{tabular}") == 2
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {9, 5}


# --- a stored comparison ----------------------------------------------------------------------------------------------


def test_a_stored_comparison_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / stored.NAME
    path.write_text(json.dumps(document()))
    assert stored.read(path) == document()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("arms"), "no 'arms' where one belongs"),
        (lambda d: d["arms"][3]["tokens"].pop("draft"), "arms[3].tokens: no 'draft' where one belongs"),
        (lambda d: d["arms"][0].update(kind="best"), "arms[0].kind: one of method, part, control, equal_tokens"),
        (lambda d: d["contrasts"][1].update(p="small"), "contrasts[1].p: a number belongs here"),
        (lambda d: d["contrasts"][1].update(p=math.nan), "contrasts[1].p: a number belongs here"),
        (lambda d: d["contrasts"][1].update(p=1e300), "contrasts[1].p: a number belongs here"),
        (
            lambda d: d["arms"][0]["seeds"][0].update(items=10**400),
            "arms[0].seeds[0].items: a whole number belongs here",
        ),
        (lambda d: d["contrasts"][1].update(p=True), "contrasts[1].p: a number belongs here"),
        (lambda d: d["samples"][0]["arms"].update(agon=[]), "samples[0].arms.agon: an object belongs here"),
        (lambda d: d["verdict"].append(3), "verdict[3]: text belongs here"),
        (lambda d: d.update(format=1), f"of format 1, and this version reads {FORMAT}"),
        (lambda d: d.update(arms={}), "arms: a list belongs here"),
    ],
)
def test_a_document_against_the_contract_is_refused_by_its_place(tmp_path: Path, change: Any, said: str) -> None:
    found = copy.deepcopy(dict(document()))
    change(found)
    path = tmp_path / stored.NAME
    path.write_text(json.dumps(found))
    with pytest.raises(UsageError) as refused:
        stored.read(path)
    assert str(path) in refused.value.message
    assert said in refused.value.message


def test_torn_json_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / stored.NAME
    path.write_text(json.dumps(document(), indent=1)[:500])
    with pytest.raises(UsageError, match=r"comparison\.json:\d+: not JSON"):
        stored.read(path)


# --- a run ------------------------------------------------------------------------------------------------------------

SMALL = ["rollout.problems=3", "rollout.group_size=4", "split.dev=7", "split.test=9", "eval.every=1", "steps=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, two steps long."""
    from agon_cli import cli

    path = tmp_path_factory.mktemp("runs") / "small"
    assert cli.main(["train", "tiny", *SMALL, "--out", str(path), "-q"]) == Exit.DONE
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


def rows_of(run: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{log}.jsonl").read_text().splitlines()]


def test_a_runs_page_says_what_its_logs_say(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = agon(capsys, "report", str(run))
    assert (code, out, err) == (0, f"{run / 'report.html'}\n", "")
    outline = Outline((run / "report.html").read_text())
    text = outline.text()
    evals = rows_of(run, "evals")
    for name, step in (("A", 2), ("B>A", 2), ("A>B", 0)):
        rows = [row for row in evals if (row["arm"], row["step"], row["split"]) == (name, step, "test")]
        right = sum(row["verdict"] == "correct" for row in rows) / len(rows)
        label = name if step else f"{name}, step 0"
        assert re.search(rf"{label}\n?[^\d]*(drafts|alone)[^\d]*{100 * right:.1f}\[", text), label
    assert [a["id"] for tag, a in outline.attributes if tag == "section"] == [
        *("arms", "curves", "steps", "drafts", "costs", "samples", "notes", "provenance")
    ]
    first = (run / "report.html").read_bytes()
    agon(capsys, "report", str(run))
    assert (run / "report.html").read_bytes() == first


def test_a_runs_document_against_slow_counts(run: Path) -> None:
    from agon_cli.report.run import document as document_of

    found = document_of(run)
    metrics, evals = rows_of(run, "metrics"), rows_of(run, "evals")
    timed = {row["arm"]: row for row in rows_of(run, "inference") if (row["step"], row["split"]) == (2, "test")}
    assert {cost["arm"] for cost in found["costs"]} == {
        arm["name"] for arm in found["arms"] if arm["kind"] != "control"
    }
    for cost in found["costs"]:
        answers = sum((r["arm"], r["step"], r["split"]) == (cost["arm"], 2, "test") for r in evals)
        seconds = {phase: taken / answers for phase, taken in timed[cost["arm"]]["seconds"].items()}
        assert cost["inference_seconds"] == pytest.approx(seconds)
        assert 0 < cost["inference"]["peak_bytes"] <= timed[cost["arm"]]["peak_bytes"]
        assert cost["training_seconds"] == pytest.approx(
            {phase: sum(row["seconds"][phase] for row in metrics) for phase in metrics[0]["seconds"]}
        )
    curve = {one["method"]: one["points"] for one in found["curves"]}
    assert set(curve) == {"A", "B", "A>B", "B>A"}
    for point in curve["A>B"]:
        before = [row for row in metrics if row["step"] < point["step"]]
        assert point["tokens"] == sum(row["tokens"]["sampled"] for row in before)
        assert point["seconds"] == pytest.approx(sum(sum(row["seconds"].values()) for row in before))
        rows = [r for r in evals if (r["arm"], r["split"], r["step"]) == ("A>B", "dev", point["step"])]
        assert point["accuracy"] == pytest.approx(sum(r["verdict"] == "correct" for r in rows) / len(rows))
    lengths = next(trace for trace in found["traces"] if trace["name"] == "length")
    for line in lengths["lines"]:
        mine = [row for row in metrics if row["roles"][line["role"]] == line["player"]]
        assert line["steps"] == [row["step"] for row in mine]
        assert line["values"] == [row["players"][line["player"]][line["role"]]["length"] for row in mine]
    assert len(found["samples"]) == 9
    chosen = found["arms"][0]["name"]
    for sample in found["samples"]:
        final = next(
            row for row in evals
            if (row["arm"], row["step"], row["split"], row["problem_id"]) == (chosen, 2, "test", sample["problem_id"])
        )  # fmt: skip
        assert sample["arms"][chosen]["final"]["text"] == final["text"]
        assert sample["question"]
        right = {True: {True: "right", False: "break"}, False: {True: "fix", False: "wrong"}}
        before, after = final["draft_verdict"] == "correct", final["verdict"] == "correct"
        assert sample["outcome"][chosen] == right[before][after]


def test_a_one_pass_run_and_a_control_have_pages_too(run: Path) -> None:
    from agon_cli.report.run import document as document_of

    path = run / "evals.jsonl"
    whole = path.read_text()
    singles = [line for line in whole.splitlines(keepends=True) if '"mode":"single"' in line]
    path.write_text("".join(singles))
    found = document_of(run)
    assert [arm["kind"] for arm in found["arms"]] == ["method", "part", "control", "control"]
    assert all(arm["table"] is None for arm in found["arms"])
    assert "drafts" not in {a.get("id") for _, a in Outline(page(found)).attributes}
    path.write_text(whole)
    recipe = run / "recipe.resolved.json"
    recipe.write_text(recipe.read_text().replace('"exchange": "rival"', '"exchange": "shuffled"'))
    stages = [stages["draft"] for sample in document_of(run)["samples"] for stages in sample["arms"].values()]
    assert {stage["summary"] for stage in stages} == {None}, "another problem's summary was read, not this one"


def test_of_two_players_that_answer_alone_the_page_is_about_the_one_that_dev_chose(run: Path) -> None:
    from agon_cli.report.run import document as document_of

    path = run / "evals.jsonl"
    for best in "AB":
        rows = [row for row in rows_of(run, "evals") if row["mode"] == "single"]
        for row in rows:
            row["verdict"] = "correct" if (row["player"] == best) == (row["split"] == "dev") else "wrong"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert document_of(run)["arms"][0]["name"] == best


def test_the_page_of_an_unfinished_run_says_so_first_and_takes_no_figure_for_one_after_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evals = rows_of(run, "evals")
    kept = [row for row in evals if row["step"] == 0 or (row["step"], row["split"]) == (1, "dev")]
    (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(metrics[0])

    def right(arm: str) -> float:
        rows = [row for row in kept if (row["arm"], row["step"], row["split"]) == (arm, 1, "dev")]
        return sum(row["verdict"] == "correct" for row in rows) / len(rows)

    assert agon(capsys, "report", str(run))[0] == 0
    best = "B>A" if right("B>A") > right("A>B") else "A>B"
    outline = Outline((run / "report.html").read_text())
    verdict = [text for tag, text in outline.texts if tag == "p"]
    told = f"Not finished: step 1 of 2; test figures are of step 0, and on dev {best} answers {100 * right(best):.1f} %"
    assert verdict[0].startswith(told)
    assert verdict[0].endswith("of 7 problems at step 1.")
    assert verdict[1].endswith("of 9 test problems before training.")
    text = outline.text()
    assert "After training" not in text
    assert "Before training, each alone" in text
    assert "Nothing was trained" not in text
    (run / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept if row["step"] == 0))
    (run / "metrics.jsonl").write_text("")
    assert agon(capsys, "report", str(run))[0] == 0
    text = (run / "report.html").read_text()
    assert "<p>Not finished: step 0 of 2; test figures are of step 0.</p>" in text
    assert 'id="steps"' not in text


def test_a_run_that_trains_nothing_is_finished_and_untrained(tmp_path: Path) -> None:
    from agon_cli.report.run import document as document_of

    found = document_of(made_up(tmp_path / "run", "moa", 0, 0.4))
    assert re.search(r"of 20 test problems without training\.$", found["verdict"][0])
    assert found["headings"]["method"] == "Without training"


@pytest.mark.parametrize(
    ("log", "change", "said"),
    [
        ("evals", lambda text: "", "evals.jsonl: no evaluation on the test split"),
        ("evals", lambda text: text[:-30], r"evals.jsonl:\d+: not JSON"),
        ("evals", lambda text: text.replace('"verdict":', '"verdikt":', 1), "evals.jsonl:1: no 'verdict'"),
        ("evals", lambda text: text.replace('"tokens":', '"tokens":"x","t":'), "evals.jsonl:1: 'tokens' is no count"),
        ("evals", lambda text: text.replace('"text":', '"text":7,"t":'), "evals.jsonl:1: 'text' is no text"),
        ("evals", lambda text: text + text, r"evals.jsonl:\d+: the evaluation of step 0 on 'dev' a second time"),
        ("metrics", lambda text: text.replace('"players":', '"player":', 1), "metrics.jsonl:1: no 'players'"),
        (
            "metrics",
            lambda text: text.replace('"sampled":', '"sampled":[],"s":'),
            "metrics.jsonl:1: 'sampled' is no count",
        ),
        ("metrics", lambda text: text.replace('"step":0', '"step":null'), "metrics.jsonl:1: 'step' is no count"),
        ("metrics", lambda text: text.replace('"reward":', '"reward":"x","r":'), "metrics.jsonl:1: 'players' holds"),
        ("metrics", lambda text: text.replace('"flags":', '"flags":7,"f":'), "metrics.jsonl:1: 'flags' is no list"),
        ("metrics", lambda text: text + "[1]\n", r"metrics.jsonl:3: not a JSON object"),
    ],
)
def test_torn_and_foreign_rows_are_refused(run: Path, log: str, change: Any, said: str, capsys: Any) -> None:
    path = run / f"{log}.jsonl"
    path.write_text(change(path.read_text()))
    code, out, err = agon(capsys, "report", str(run))
    assert (code, out) == (Exit.USAGE, "")
    assert re.search(said, err), err
    assert "hint: " in err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"argv": 3}', '{"hashes": []}', '{"versions": "1"}'])
def test_a_broken_manifest_is_refused(run: Path, text: str, capsys: Any) -> None:
    (run / "manifest.json").write_text(text)
    code, _, err = agon(capsys, "report", str(run))
    assert code == Exit.USAGE
    assert "manifest.json" in err


def test_hostile_rows_of_a_run_are_text(run: Path, capsys: Any) -> None:
    path = run / "evals.jsonl"
    path.write_text(re.sub(r'"text":"[^"]*"', lambda _: f'"text":{json.dumps(HOSTILE)}', path.read_text()))
    assert agon(capsys, "report", str(run))[0] == 0
    outline = Outline((run / "report.html").read_text())
    assert outline.elements["script"] == 0
    assert "<script>window.ran = true" in outline.text()


def test_the_command_draws_a_comparison_anew_and_names_what_is_no_run(drawn: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / stored.NAME).write_text(json.dumps(document()))
    code, out, _ = agon(capsys, "report", str(tmp_path), "--json")
    assert code == 0
    assert json.loads(out) == {"event": "report", "path": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").read_text() == drawn
    other = tmp_path / "other.html"
    assert agon(capsys, "report", str(tmp_path), "--out", str(other))[1] == f"{other}\n"
    assert other.read_text() == drawn
    code, out, err = agon(capsys, "report", str(tmp_path / "nothing"))
    assert (code, out) == (Exit.USAGE, "")
    assert "is no run" in err
    (tmp_path / "file").touch()
    for impossible in (tmp_path / "a" / "b.html", tmp_path / "file" / "b.html", "/", ".", "x" * 5000):
        assert agon(capsys, "report", str(tmp_path), "--out", str(impossible))[0] == Exit.USAGE
    assert agon(capsys, "report", "x" * 5000)[0] == Exit.USAGE


def test_the_command_loads_no_torch(run: Path) -> None:
    program = (
        "import sys; from agon_cli.cli import main; code = main(['report', sys.argv[1]])\n"
        "print(code, sorted({'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {"PYTHONPATH": str(Path(report.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr.splitlines()[-1] == "0 []"


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_the_terminal_says_what_the_page_says(capsys: Any) -> None:
    found = document()
    show_comparison(found)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[: len(found["verdict"])] == found["verdict"]
    for arm in found["arms"]:
        accuracy = arm["accuracy"]
        figures = f"{100 * accuracy['value']:.1f} [{100 * accuracy['low']:.1f}, {100 * accuracy['high']:.1f}]"
        assert any(line.startswith(arm["name"]) and figures in line for line in lines), arm["name"]
    for contrast in found["contrasts"]:
        row = next(line for line in lines if line.startswith(f"{contrast['left']} - {contrast['right']}  "))
        assert row.endswith(contrast["verdict"])
    (both_wrong, fixed), (broken, both_right) = found["arms"][0]["table"] or [[0, 0], [0, 0]]
    assert any(re.match(r" +accuracy \[95%\] +tokens  generated  fix", line) for line in lines)
    assert any(line.startswith("tokens: ") and line.endswith("generated: draft + answer") for line in lines)
    assert any(re.fullmatch(rf"draft right +{both_right} +{broken}  break 14%", line) for line in lines)
    assert any(re.match(rf"draft wrong +{fixed} +{both_wrong}  fix 30%", line) for line in lines)
    assert f"note: {found['notes'][0]}" in lines
    assert "gate agon>=grpo: met, 49.9 against 36.7, an interval above zero" in lines
    assert "agon>coop:" not in out, "the error that the command ends with tells an unmet gate"
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in lines)
    prose = {*found["verdict"], *(f"note: {note}" for note in found["notes"])}
    assert max(len(line) for line in lines if line not in prose) <= 80


def test_the_terminal_obeys_nothing_in_a_document(capsys: Any) -> None:
    found: Document = document()
    found["verdict"] = [HOSTILE[:200]]
    found["arms"][0]["name"] = found["contrasts"][0]["left"] = "[red]\x1b[2J" + "long" * 30
    found["notes"] = ["[bold]\x07\u202e"]
    show_comparison(found)
    out = capsys.readouterr().out
    assert "[red]" in out
    assert "note: [bold]" in out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", out)
