"""The command line: parse, call, exit code. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.main import get_command

from agon_cli import __version__, compare_commands, data_commands
from agon_cli.errors import AgonError, Exit, UsageError
from agon_cli.halt import orderly_end
from agon_cli.memory import collect_as_usual, collect_rarely
from agon_cli.options import AllowUnsafe, AsJson, Overrides, Quiet, RecipeArgument

_ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}

_CHATTY = ("bitsandbytes", "datasets", "huggingface_hub", "peft", "torch", "transformers")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language models that grade each other's reasoning, and deploy the pair as a cascade.",
)

RecipeOption = Annotated[str | None, typer.Option("--recipe", metavar="RECIPE", help="Recipe whose prompts to use.")]


class Mode(str, Enum):
    """How a player or a pair is judged."""

    single = "single"
    cascade = "cascade"


class SplitName(str, Enum):
    """Which held-out problems are used."""

    dev = "dev"
    test = "test"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agon {__version__}")
        raise typer.Exit


@app.callback()
def agon(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options that need no command."""


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.  [default: runs/<recipe>]", show_default=False)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard the run that is there and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check recipe and data, show what would run.")] = False,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Stop after this step.", show_default=False)] = None,
    gpus: Annotated[int, typer.Option(min=1, max=99, metavar="N", help="GPUs; without any, N CPU processes.")] = 1,
    shard: Annotated[bool, typer.Option("--shard", help="Lay each base over all GPUs; sampling is servers'.")] = False,
    unsafe: AllowUnsafe = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train the players of RECIPE. The same command again goes on where it stopped."""
    from agon_cli import environment, launch, session, sharding
    from agon_cli.halt import Halt

    launch.attach()
    environment.check_asked(gpus)
    planned = session.plan(recipe, overrides or [], out, shard)
    if shard:
        sharding.check(planned.recipe, gpus)
    if dry_run:
        plan = session.dry_run(planned, fresh, gpus)
        if as_json:
            _print_json("plan", plan)
        else:
            from agon_cli.console.plan import show_needs

            _results().show_plan(plan)
            show_needs(plan["needs"])
        return
    asked = {"--shard": shard, "--allow-unsafe-exec": unsafe, "--json": as_json, "--quiet": quiet}
    flags = [flag for flag, given in asked.items() if given]
    where = ["--out", str(out)] if out is not None else []
    where += ["--gpus", str(gpus)] if gpus > 1 else []
    until = ["--max-steps", str(max_steps)] if max_steps else []
    beyond, again = (shlex.join(["agon", "train", recipe, *(overrides or []), *where, *given, *flags])
                     for given in ([], until))  # fmt: skip
    others = [word for word in overrides or [] if not word.startswith(("method=", "method."))]
    grpo = shlex.join(["agon", "train", recipe, *others, "method=grpo", "--out", f"{planned.out}-grpo"])
    if gpus > 1 and environment.processes() == 1:
        launch.launch([*shlex.split(again)[1:], *(["--fresh"] if fresh else [])], gpus, again)
        return
    from agon_cli.console.observers import observer

    as_json, quiet = as_json and not environment.follows(), quiet or environment.follows()
    with Halt(quiet or as_json) as halt:
        with observer(as_json, quiet) as listen:
            result = session.train(planned, ["agon", *sys.argv[1:]], fresh, max_steps, listen, halt, again)
        if result is None:
            return
        if as_json:
            _print_json("done", result)
        elif result["complete"]:
            more = [grpo] if planned.recipe.method.preset != "grpo" else []
            _results().show_training(result, planned.recipe.seed, more)
        elif not quiet:
            _talk(f"stopped at step {result['step']} of {result['steps']} (--max-steps)", f"go on with: {beyond}")


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu_mem: Annotated[float | None, typer.Option(min=0.1, max=1e6, metavar="GIB", show_default=False,
                                                  help="Memory of a GPU; say what to change so that it fits.")] = None,
    gpus: Annotated[int, typer.Option(min=1, max=99, metavar="N", help="Devices that share the work.")] = 1,
    probe: Annotated[bool, typer.Option("--probe", help="Also take one step at its caps, measured.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Say what RECIPE needs: memory by part, tokens, time and disk. Reads the model's configuration alone."""
    from agon_cli import session

    planned = session.plan(recipe, overrides or [], None)
    if not (quiet or as_json):
        _talk("taking the step, then counting" if probe else "counting on tensors without storage")
    needs = session.needs(planned.recipe, gpu_mem, gpus, probe)
    if as_json:
        _print_json("needs", needs)
    else:
        from agon_cli.console.plan import show_needs

        show_needs(needs)


@app.command(name="eval")
def evaluate(
    source: Annotated[str, typer.Argument(
        metavar="RECIPE|RUN|MODEL", help="A run folder, a recipe (its untrained base), an adapter folder, a base.")],
    overrides: Overrides = None,
    mode: Annotated[Mode | None, typer.Option(help="Players alone, or cascades too.  [default: as the recipe deploys]",
                                              show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N problems of each split.",
                                              show_default=False)] = None,
    samples: Annotated[int, typer.Option(min=1, max=4096, help="Completions per problem and stage.")] = 1,
    split: Annotated[SplitName, typer.Option(help="Which held-out problems.")] = SplitName.test,
    recipe: RecipeOption = None,
    unsafe: AllowUnsafe = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Measure pass@1 of each player alone and of the cascade in every direction. Writes nothing."""
    from agon_cli import session
    from agon_cli.console.observers import observer, sampling_line

    who = session.entrant(source, overrides or [], recipe)
    if not (quiet or as_json):
        _talk(f"evaluating {who.what}", sampling_line(session.sampling(who.recipe)))
    with observer(as_json, quiet) as listen:
        result = session.evaluate(who, mode and mode.value, split.value, limit, samples, listen)
    rows = result.pop("rows")
    if as_json:
        for row in rows:
            _print_json("row", row)
        _print_json("result", result)
    else:
        _results().show_evaluation(result)


@app.command()
def cascade(
    problem: Annotated[str | None, typer.Argument(metavar="PROBLEM", help="The problem; - reads it from stdin.",
                                                  show_default=False)] = None,
    drafter: Annotated[str | None, typer.Option(metavar="A", show_default=False, help="Who drafts: a player of a run, "
        "an adapter folder, or a base model (Hub id or folder).  [default: as the run did best on dev]")] = None,
    solver: Annotated[str | None, typer.Option(metavar="B", show_default=False, help="Who answers, likewise.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run that players are taken from.  [default: the newest]",
                                             show_default=False)] = None,
    recipe: RecipeOption = None,
    file: Annotated[str | None, typer.Option("-f", "--file", metavar="FILE.jsonl", show_default=False,
        help="Batch: objects with `question` and optionally `gold`, one a line; - for stdin.")] = None,
    gold: Annotated[str | None, typer.Option(help="Right answer, to grade both stages.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature, above 0.  [default: the recipe's]",
                                                      show_default=False)] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token at every place.")] = False,
    unsafe: AllowUnsafe = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Let one player draft and another answer after reading the draft's summary."""
    from agon_cli.questions import read_problems

    problems = read_problems(problem, file, gold)
    if temperature is not None and not 0 < temperature < float("inf"):
        raise UsageError(f"--temperature {temperature:g} is not above 0", "for the likeliest answer use --greedy")
    from agon_cli.console.answers import Answers
    from agon_cli.console.observers import observer

    with observer(as_json, quiet) as listen:
        listen("phase", name="load")
        from agon_cli.cascade import open_cascade, record

        pair = open_cascade(drafter, solver, run, recipe, seed, temperature, greedy)
        shown = Answers(listen, alone=file is None, as_json=as_json, quiet=quiet)
        try:
            pair.check(problems)
            shown.begin(pair.describe())
            pair.tell = lambda text: listen("warning", text=text)
            for text in pair.unknown(problems):
                pair.tell(text)
            for exchange in pair.answer(problems, lambda name: listen("phase", name=name)):
                shown(record(exchange, pair))
        finally:
            pair.close()
        shown.end()


app.add_typer(data_commands.data, name="data")
app.command()(data_commands.verify)
app.command()(compare_commands.compare)
app.command()(compare_commands.report)


def _results() -> Any:
    from agon_cli.console import results

    return results


def _print_json(event: str, payload: dict[str, Any]) -> None:
    from agon_cli.console.text import as_line

    sys.stdout.write(as_line(event, payload) + "\n")


def _talk(*lines: str) -> None:
    from agon_cli.console.text import clean

    for line in lines:
        sys.stderr.write(clean(line) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    collect_rarely()
    _hush_libraries()
    _open_streams()
    with redirect_stderr(_Heedless(sys.stderr)):
        code = _run(list(sys.argv[1:] if argv is None else argv) or ["--help"])
    collect_as_usual()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what is still buffered must not fail again at interpreter exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code and (os.environ.get("WORLD_SIZE") or "1") != "1":
        os._exit(code)  # once a rank is lost, the threads of torch's transport can abort an orderly end
    return code


def _run(words: list[str]) -> int:
    try:
        command = get_command(app)
        with orderly_end(), command.make_context("agon", words.copy()) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as stop:
        return stop.exit_code
    except BrokenPipeError:
        return Exit.DONE  # the reader has what it wanted
    except typer.TyperException as error:
        return _fail(UsageError(error.format_message(), _see_help(words)), words)
    except (Exception, KeyboardInterrupt) as error:
        return _fail(error, words)
    return Exit.DONE


class _Heedless:
    """stderr. When its reader goes away or its disk is full, the work goes on, unheard."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_streams() -> None:
    """Streams that take any text. Those that were closed lead nowhere: a run's file must not get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the whole process)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _hush_libraries() -> None:
    """No telemetry; and of what libraries say, only errors, unless AGON_DEBUG is set."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("AGON_DEBUG"):
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")


def _see_help(words: Sequence[str]) -> str:
    known = ("train", "plan", "eval", "cascade", "data", "verify", "compare", "report")
    names = [word for word in words if word in known]
    return f"see {' '.join(['agon', *names[:1], '--help'])}"


def _fail(error: BaseException, words: Sequence[str]) -> int:
    """Say what went wrong and what to do about it; returns the exit code."""
    from agon_cli import launch
    from agon_cli.session import failure

    known, trace = failure(error), ""
    if known is None:
        trace = "".join(traceback.format_exception(error)).rstrip()
        known = AgonError(f"{type(error).__name__}: {error}", "this is a bug in agon: report it with the lines above")
    if launch.report(known, trace):
        return int(known.code)
    if trace:
        _talk(trace)
    message, *more = known.message.splitlines() or [""]
    _talk(f"error: {message}", *(f"       {line.strip()}" if known.code is Exit.USAGE else line for line in more))
    if known.hint:
        _talk(f"hint: {known.hint}")
    if "--json" in words:
        with suppress(OSError):
            _print_json("error", {"message": known.message, "hint": known.hint, "code": int(known.code)})
            sys.stdout.flush()
    return int(known.code)


if __name__ == "__main__":
    sys.exit(main())
