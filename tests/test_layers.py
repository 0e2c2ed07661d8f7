"""The shape of the project: who imports whom, how large a module may grow, and what `agon --help` may load."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "agon_cli"

# The rows of the design, from what everything rests on to the command line. A letter orders modules within a row. Each
# unit is a module or a package; what follows is every third-party import it may make, at the top or inside a function.
ROWS: dict[str, dict[str, set[str]]] = {
    "0": {"__init__": set(), "errors": set(), "types": set(), "families": set(), "prose": set()},
    "1": {"recipe": {"pydantic", "pydantic_core", "ruamel"}, "environment": set()},
    "2a": {"wide": {"torch"}},
    "2b": {"narrow": {"torch"}, "packing": {"torch"}},
    "2c": {
        "rewards": set(),
        "advantages": set(),
        "roles": set(),
        "summaries": set(),
        "metrics": set(),
        "clock": set(),
        "stats": {"scipy", "numpy", "statsmodels"},
        "document": set(),
        "losses": {"torch"},
        "batching": {"torch"},
        "halt": set(),
        "memory": {"torch"},
        "attention": {"torch", "transformers"},
        "lora": {"torch", "peft"},
        "norms": {"torch"},
        "forward": {"torch", "transformers"},
        "ranks": {"torch", "accelerate"},
        "tiny": {"torch", "tokenizers", "transformers"},
    },
    "3a": {
        "data": {"datasets", "pyarrow", "reasoning_gym"},
        "prompts": set(),
        "verifiers": {"pebble", "math_verify", "latex2sympy2_extended", "sympy", "reasoning_gym"},
        "models": {"torch", "transformers", "safetensors"},
        "checkpoint": {"torch", "safetensors"},
        "manifest": set(),
        "runlog": set(),
        "launch": set(),
    },
    "3b": {"questions": set(), "policy": {"torch", "transformers", "peft", "bitsandbytes"}},
    "3c": {
        "engines": {"torch", "numpy", "transformers", "peft", "safetensors", "vllm"},
        "sharding": {"torch", "transformers"},
    },
    "4": {"canary": {"torch"}, "rollout": set(), "update": {"torch"}, "outline": {"torch", "transformers"}},
    "4b": {"inspect_data": set(), "verify": set(), "tally": set()},
    "5a": {"assemble": set(), "records": set(), "players": {"pydantic", "safetensors"}},
    "5b": {"evaluate": set(), "costs": {"torch"}},
    "5c": {"train": {"torch"}, "cascade": set(), "plan": {"torch"}, "probe": {"torch"}},
    "5d": {"session": set()},
    "5e": {"compare": {"numpy"}},
    "6": {"report": {"jinja2", "matplotlib", "markupsafe"}, "console": {"rich"}},
    "7a": {"options": {"typer"}},
    "7b": {"data_commands": {"typer"}, "compare_commands": {"typer"}},
    "7c": {"cli": {"typer", "rich"}},
}
ROW_OF = {unit: number for number, units in enumerate(ROWS.values()) for unit in units}
ALLOWED = {unit: packages for units in ROWS.values() for unit, packages in units.items()}
HEAVY = {"torch", "accelerate", "transformers", "peft", "bitsandbytes", "vllm", "datasets", "reasoning_gym"}
HEAVY |= {"scipy", "numpy"}

FORBIDDEN_CLASSES = ("Trainer", "Manager", "Helper", "Helpers", "Util", "Utils")
FORBIDDEN_MODULES = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}
MOST_LINES_OF_A_MODULE = 400
MOST_LINES_OF_A_FUNCTION = 60

MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in MODULES]


def unit_of(path: Path) -> str:
    """The unit a file belongs to: its package within agon_cli, else itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module that the code imports anywhere, with its full dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("agon_cli", *path.relative_to(PACKAGE).parts[:-1])
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield from ([f"{base}.{alias.name}" for alias in node.names] if base == "agon_cli" else [base])


def complaints(source: str, path: Path) -> list[str]:
    """What a module imports against the table."""
    unit = unit_of(path)
    if unit not in ROW_OF:
        return [f"{unit} has no row: give it one in tests/test_layers.py"]
    found = []
    for name in imports(ast.parse(source), path):
        top, _, rest = name.partition(".")
        if top != "agon_cli":
            if top not in sys.stdlib_module_names and top not in ALLOWED[unit]:
                found.append(f"{unit} may not import {top}")
            continue
        other = rest.partition(".")[0]
        other = (
            other if other in ROW_OF or (PACKAGE / other).is_dir() or (PACKAGE / f"{other}.py").exists() else "__init__"
        )
        if other not in ROW_OF:
            found.append(f"{other} has no row")
        elif other != unit and ROW_OF[other] >= ROW_OF[unit]:
            found.append(f"{unit} may not import {other}: it does not stand in a row above")
    return found


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_a_module_imports_only_from_the_rows_above(path):
    assert complaints(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("rewards", "import torch", "rewards may not import torch"),
        ("rewards", "def f():\n    from agon_cli import train", "rewards may not import train"),
        ("rewards", "from agon_cli.rollout import Sampler", "rewards may not import rollout"),
        ("rewards", "from agon_cli.advantages import advantages", "rewards may not import advantages"),
        ("rewards", "from .rollout import Sampler", "rewards may not import rollout"),
        ("recipe/load", "from ..train import run", "recipe may not import train"),
        ("train", "import peft", "train may not import peft"),
        ("prompts", "import transformers.utils", "prompts may not import transformers"),
        ("novelty", "", "novelty has no row"),
    ],
)
def test_an_import_against_the_table_is_noticed(module, source, said):
    assert complaints(source, PACKAGE / f"{module}.py")[0].startswith(said)


def test_an_import_with_the_table_passes():
    source = "import json\nimport ruamel.yaml\nfrom agon_cli import __version__\nfrom .schema import Recipe\n"
    assert complaints(source, PACKAGE / "recipe" / "load.py") == []


def test_the_table_names_no_unit_twice():
    assert len(ROW_OF) == sum(len(units) for units in ROWS.values())


# --- sizes and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_modules_and_functions_stay_on_the_screen(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES_OF_A_MODULE
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION} == {}


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_names_say_what_things_are(path):
    assert path.stem not in FORBIDDEN_MODULES
    classes = [
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    ]
    assert [name for name in classes if name.endswith(FORBIDDEN_CLASSES)] == []


# --- what a quick command loads ---------------------------------------------------------------------------------------


def loaded_at_import(unit_path: Path, seen: dict[Path, set[str]]) -> set[str]:
    """Third-party packages that importing a module of ours loads, by the statements at its top and those of ours it
    imports there."""
    if unit_path in seen:
        return seen[unit_path]
    seen[unit_path] = set()
    loaded: set[str] = set()
    for statement in _at_the_top(ast.parse(unit_path.read_text(encoding="utf-8"))):
        for name in imports(statement, unit_path):
            top, _, rest = name.partition(".")
            if top != "agon_cli":
                loaded.add(top)
                continue
            for depth in range(1, rest.count(".") + 2):
                file = PACKAGE.joinpath(*rest.split(".")[:depth])
                for candidate in (file / "__init__.py", file.with_suffix(".py")):
                    if candidate.exists():
                        loaded |= loaded_at_import(candidate, seen)
    seen[unit_path] = loaded
    return loaded


def _at_the_top(tree: ast.Module) -> Iterator[ast.stmt]:
    for statement in tree.body:
        typing_only = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if not typing_only and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if unit_of(path) in {"__init__", "errors", "types", "recipe", "console", "cli"}],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_command_line_loads_nothing_heavy_by_its_imports(path):
    assert loaded_at_import(path, {}) & HEAVY == set()


def test_a_heavy_import_behind_another_module_is_noticed():
    assert "torch" in loaded_at_import(PACKAGE / "train.py", {})


def child(program: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A Python program run on its own, and the CPU seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["train", "--help"], 0),
        (["train", "no-such-recipe"], 2),
        (["train", "recipes/tiny.yaml", "optim.lrr=1"], 2),
    ],
    ids=["help", "version", "help of a command", "missing recipe", "bad override"],
)
def test_help_and_recipe_errors_are_quick_and_load_nothing_heavy(words, code):
    program = (
        f"import sys; sys.argv = ['agon', *{words!r}]\n"
        "from agon_cli.cli import main\n"
        "try:\n    ended = main()\nexcept SystemExit as exit:\n    ended = exit.code\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), int(ended or 0), file=sys.stderr)"
    )
    # The floor: what Python and the libraries of the command line take by themselves on this machine.
    floor = min(child("import typer, rich.console, pydantic, ruamel.yaml")[1] for _ in range(3))
    runs = [child(program) for _ in range(3)]
    assert runs[0][0].stderr.splitlines()[-1] == f"[] {code}", runs[0][0].stderr
    assert min(seconds for _, seconds in runs) < max(0.6, 4 * floor)
