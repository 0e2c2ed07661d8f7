"""Run workloads W1 to W4, each side in turn (A B A B ...), and print medians and ratios.

docs/benchmarks.md says what they are. The table goes to stdout, everything measured to a JSON file.

Standard library only, and small: on Linux a child's peak memory starts at that of the process which started it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from workloads import HERE

Row = dict[str, Any]
NAMES = ("w1", "w2", "w3", "w4")
STEPS = {"w1": 3, "w2": 1}
"""Counted steps of one run; one uncounted step comes before."""


def alternate(sides: Mapping[str, Callable[[], Row]], pairs: int) -> dict[str, list[Row]]:
    """What every side returned, run in turn, `pairs` times over."""
    runs: dict[str, list[Row]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name, run in sides.items():
            runs[name].append(run())
            shown = {
                key: round(value, 1) for key, value in runs[name][-1].items() if key in ("tokens_per_s", "seconds")
            }
            memory = {key: value for key, value in runs[name][-1].items() if key.startswith("peak_")}
            _talk(f"  pair {pair + 1} of {pairs}, {name}: {shown | memory}")
    return runs


def compare(key: str, over: Sequence[Row], under: Sequence[Row]) -> Row:
    """Medians of one figure on both sides, their ratio, and the lowest and highest ratio of a pair."""
    above, below = [row[key] for row in over], [row[key] for row in under]
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "figure": key, "ours": median(above), "theirs": median(below), "ratio": median(above) / median(below),
        "lowest": min(ratios), "highest": max(ratios),
    }  # fmt: skip


def launch(command: Sequence[str], threads: int) -> Row:
    """A program in a fresh process with so many threads; what its last line of stdout holds."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = subprocess.run(list(command), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def prepared(vocab_factor: int) -> str:
    """The model's folder, made in a process of its own: what that takes is no part of a side's peak."""
    return str(launch(_script("agon_grpo.py", "--prepare", "--vocab-factor", vocab_factor), 1)["model_dir"])


def grpo(name: str, given: argparse.Namespace) -> Row:
    """W1 or W2: fresh processes of either side in turn; W2 also agon's peak with the vocabulary enlarged."""
    common = ["--workload", name, "--steps", given.steps or STEPS[name], "--warmup", 1]
    common += ["--tokens", given.tokens] if given.tokens else []
    dense = ["--dense"] if given.rewards == "dense" else []
    peer = [given.peer_python, given.peer_script or HERE / "peer_trl.py", *common]
    model = prepared(1)
    agon = _script("agon_grpo.py", *common, *dense, f"model.dtype={given.dtype}", *given.set)
    rows = ["--rows", given.peer_rows] if given.peer_rows else []
    known = [] if given.peer_script else [*dense, *rows, "--dtype", given.dtype]
    theirs = [str(word) for word in [*peer, "--model-dir", model, *known]]
    sides = {
        "agon": lambda: launch([*agon, "--model-dir", model], given.threads),
        "peer": lambda: launch(theirs, given.threads),
    }
    if wider := name == "w2" and given.vocab_factor > 1:
        large = prepared(given.vocab_factor)
        sides["wider"] = lambda: launch([*agon, "--model-dir", large], given.threads)
    runs = alternate(sides, given.pairs)
    table = [compare(key, runs["agon"], runs["peer"]) for key in ("tokens_per_s", "s_per_step", "peak_rss_mib")]
    if all("peak_gpu_mib" in row for side in ("agon", "peer") for row in runs[side]):
        table.append(compare("peak_gpu_mib", runs["agon"], runs["peer"]))
    if wider:
        table.append(compare("peak_rss_mib", runs["wider"], runs["agon"]) | {
            "figure": f"peak_rss_mib, vocabulary x{given.vocab_factor} : x1"})  # fmt: skip
    return {
        "workload": name,
        "new_tokens": given.tokens,
        "rewards": given.rewards,
        "dtype": given.dtype,
        "table": table,
        "runs": runs,
    }


def sampling(given: argparse.Namespace) -> Row:
    """W3: both sides in one process."""
    line = launch(_script("w3_sampling.py", "--pairs", given.pairs), 1)
    return {
        "workload": "w3",
        "table": [compare("tokens_per_s", line["laps"]["agon"], line["laps"]["peer"])],
        "runs": line,
    }


def step(recipe: str, given: argparse.Namespace) -> Row:
    """W4: all sides in one process."""
    line = launch(_script("w4_step.py", "--recipe", recipe, "--pairs", given.pairs), 1)
    laps = line["laps"]
    table = [compare(key, laps["agon"], laps["grpo"]) for key in ("seconds", "all_tokens")]
    for key in ("seconds", "tokens", "all_tokens"):
        row = compare(key, laps["agon"], laps["grpo_written"])
        table.append(row | {"figure": f"{key}, as many tokens written"})
    return {"workload": "w4", "recipe": recipe, "table": table, "runs": line}


def _script(name: str, *words: object) -> list[str]:
    return [sys.executable, str(HERE / name), *map(str, words)]


def _talk(text: str) -> None:
    sys.stderr.write(text + "\n")


def about() -> Row:
    """The machine, and how busy it is."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()], "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip


def show(result: Row) -> None:
    """One workload's rows of the table."""
    label = result["workload"].upper() + (f" {result['recipe']}" if "recipe" in result else "")
    for row in result["table"]:
        ours, theirs = (f"{row[key]:,.1f}" for key in ("ours", "theirs"))
        spread = f"({row['lowest']:.2f} to {row['highest']:.2f})"
        sys.stdout.write(f"{label:<24}{row['figure']:<36}{ours:>12}{theirs:>12}{row['ratio']:>8.2f}  {spread}\n")
    sys.stdout.flush()


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="w1, w2, w3, w4; default: w1 w3 w4")
    parser.add_argument("--pairs", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, metavar="N", help="counted steps of a run of W1 (3) and W2 (1)")
    parser.add_argument("--tokens", type=int, metavar="N", help="new tokens of a completion in W1 (64) and W2 (1024)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of either side in W1 and W2; W3, W4: one")
    parser.add_argument(
        "--rewards", choices=("dense", "sum"), default="dense", help="dense: every row has an advantage"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the base in W1 and W2")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that holds TRL (default: this one)")
    parser.add_argument(
        "--peer-script", type=Path, help="another peer: --workload --steps --warmup --model-dir, one JSON line"
    )
    parser.add_argument("--peer-rows", type=int, metavar="N", help="rows TRL puts through one backward pass (16, 8)")
    parser.add_argument(
        "--vocab-factor", type=int, default=2, metavar="N", help="W2: also agon with N times the vocabulary"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="agon's recipe in W1, W2"
    )
    parser.add_argument("--w4-recipes", nargs="+", default=["tiny"], metavar="RECIPE")
    parser.add_argument("--out", type=Path, default=Path("build", "bench.json"), help="the JSON file")
    given = parser.parse_intermixed_args(words)
    given.workloads = given.workloads or ["w1", "w3", "w4"]
    if given.peer_script and given.peer_rows:
        parser.error("--peer-rows is for TRL: a --peer-script is given only what both sides share")
    if unknown := set(given.workloads) - set(NAMES):
        parser.error(f"no workload is called {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    return given


def main(words: Sequence[str] | None = None) -> None:
    """Parse, run, show; the JSON file is written again after every workload."""
    given = parsed(words)
    jobs: list[Callable[[], Row]] = []
    for name in given.workloads:
        if name in STEPS:
            jobs.append(lambda name=name: grpo(name, given))  # type: ignore[misc]
        elif name == "w3":
            jobs.append(lambda: sampling(given))
        else:
            jobs += [lambda recipe=recipe: step(recipe, given) for recipe in given.w4_recipes]  # type: ignore[misc]
    found: Row = {"machine": about(), "pairs": given.pairs, "argv": sys.argv[1:], "results": []}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{'':<24}{'median of ' + str(given.pairs):<36}{'agon':>12}{'peer':>12}{'ratio':>8}  (of pairs)\n")
    for job in jobs:
        result = job()
        found["results"].append(result)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        show(result)
    _talk(f"everything measured: {given.out}")


if __name__ == "__main__":
    main()
