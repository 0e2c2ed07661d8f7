"""What `agon train` and `agon eval` do, short of the screen: set up, run under signals, put the figures together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agon_cli.errors import DISK_FULL, AgonError, Exit, ResourceError, Stopped, UsageError
from agon_cli.halt import Halt, Terminated
from agon_cli.manifest import describe
from agon_cli.memory import is_out_of_memory
from agon_cli.recipe import Recipe, load, locate, resolved
from agon_cli.runlog import RunFolder, check, find_run, has_begun, is_run

if TYPE_CHECKING:
    from agon_cli.assemble import World
    from agon_cli.players import Found
    from agon_cli.ranks import Ranks

Emit = Callable[..., None]
Row = dict[str, Any]
INTERVAL = 10
"""Steps between two reports of a run that is not evaluated in between."""


@dataclass(frozen=True)
class Plan:
    """A training run as it was asked for, known before anything heavy is loaded."""

    recipe: Recipe
    source: Path
    out: Path
    sharded: bool = False

    @property
    def steps(self) -> int:
        """Optimiser steps; none where the method leaves the base as it is."""
        return self.recipe.training_steps

    @property
    def every(self) -> int:
        """Steps between two reports."""
        return self.recipe.eval.every or INTERVAL

    def describe(self) -> Row:
        """What would run, as JSON values: players, method, sampling, sizes."""
        recipe = self.recipe
        alone = recipe.method.opponent == "none"
        size = recipe.rollout.group_size
        return {
            "recipe": str(self.source),
            "out": str(self.out),
            "method": recipe.method.model_dump(mode="json"),
            "players": {
                name: {"base": recipe.model_of(name).id, "dtype": recipe.model_of(name).dtype,
                       "quantization": recipe.model_of(name).quantization, "noise": recipe.players[name].noise}
                for name in recipe.cast
            },
            "lora": recipe.lora.model_dump(mode="json"),
            "steps": self.steps,
            "problems_per_step": recipe.rollout.problems,
            "drafts": 2 * size if alone else size,
            "challenges": 0 if alone else size,
            "sampling": sampling(recipe),
            "lr": recipe.optim.lr,
            "every": self.every,
            "eval_every": recipe.eval.every,
            "seed": recipe.seed,
        }  # fmt: skip


def plan(source: str, overrides: Sequence[str], out: Path | None, sharded: bool = False) -> Plan:
    """Read the recipe; the run folder is `runs/<recipe>` unless named. Raises UsageError for whatever is wrong."""
    recipe, path = load(source, overrides), locate(source)
    return Plan(recipe, path, out if out is not None else Path("runs", path.stem), sharded)


def sampling(recipe: Recipe) -> Row:
    """The values that shape every sample: these and no others, whatever a model's generation config says."""
    rollout = recipe.rollout
    keys = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": 0, "max_tokens": rollout.max_tokens}
    return keys | {"max_prompt_tokens": rollout.max_prompt_tokens, "summary_tokens": recipe.summary.max_tokens}


def dry_run(planned: Plan, fresh: bool, gpus: int) -> Row:
    """What `train` would do, with the problems counted and what it needs on each of `gpus` devices; loads data and no
    weights, writes nothing.

    `there` says what becomes of a run in the folder: `none` is there, it is `complete`, `goes on` or is `discarded`.
    Raises the UsageError that `train` would.
    """
    from agon_cli import data
    from agon_cli.evaluate import is_complete

    check(planned.out, resolved(planned.recipe), fresh)
    there = "none"
    if has_begun(planned.out):
        there = "discarded" if fresh else "complete" if is_complete(planned.out, planned.steps) else "goes on"
    problems = data.load(planned.recipe).sizes()
    return planned.describe() | {"problems": problems, "there": there, "needs": needs(planned.recipe, gpus=gpus)}


def needs(recipe: Recipe, gpu_memory: float | None = None, gpus: int = 1, measure: bool = False) -> Row:
    """What a recipe will take on each of `gpus` devices of `gpu_memory` GiB, without its weights; `measure` also takes
    one device's share of a step as heavy as they come, under `probe`."""
    from agon_cli.plan import GIB, estimate

    measured = None
    if measure:
        from agon_cli.probe import probe

        measured = probe(recipe, gpus)
    return estimate(recipe, int(gpu_memory * GIB) if gpu_memory else None, gpus) | {"probe": measured}


def train(
    planned: Plan, command: Sequence[str], fresh: bool, until: int | None, emit: Emit, halt: Halt, again: str
) -> Row | None:
    """Train, or go on training; the figures before and after, where the run is complete by then. None on every rank
    but the first, which alone has the run folder.

    `again` is the command that continues. Raises Stopped when a signal ended the run, and whatever training raises.
    """
    recipe, steps = planned.recipe, planned.steps
    text = planned.source.read_text(encoding="utf-8", errors="replace")
    emit("start", **planned.describe(), until=until)
    manifest = describe(recipe.seed, {}, command)
    try:
        from agon_cli.evaluate import is_complete
        from agon_cli.ranks import join

        ranks = join()
        manifest["hardware"] |= {"ranks": ranks.size, "sharded": planned.sharded}
        if ranks.size > 1:
            emit("ranks", size=ranks.size, device=ranks.device)
        opened = RunFolder.open(planned.out, text, resolved(recipe), manifest, fresh) if ranks.first else nullcontext()
        with opened as run:
            reached, example = steps, None
            if ranks.told(lambda: is_complete(planned.out, steps)):
                emit("complete", step=steps, out=str(planned.out))
            else:
                reached, example = _play(planned, run, ranks, until, emit, halt)
            ranks.leave()
            if ranks.first and halt() and not is_complete(planned.out, steps):
                raise _stopped(halt, f"after step {reached} of {steps}; the state is saved", again)
            if run is None:
                return None
            told: Row = {"complete": reached >= steps, "step": reached, "steps": steps, "out": str(planned.out)}
            if reached < steps:
                return told
            return told | {"example": example or _example(recipe)} | outcome(run.read("evals"))
    except KeyboardInterrupt:
        raise _stopped(halt, "between steps; every step taken is saved", again) from None


def _stopped(halt: Halt, when: str, again: str) -> Stopped:
    name = halt.signal.name if halt.signal is not None else "SIGINT"
    return Stopped(f"stopped by {name} {when}", f"continue with: {again}", halt.code)


def _play(
    planned: Plan, run: RunFolder | None, ranks: Ranks, until: int | None, emit: Emit, halt: Halt
) -> tuple[int, str]:
    """Load everything and train; the step reached, and a problem to try the players on."""
    from agon_cli.assemble import assemble
    from agon_cli.train import train as train_loop

    emit("phase", name="load")
    scratch = planned.out / ".adapters"
    world = assemble(planned.recipe, ranks, scratch, lambda text: emit("warning", text=text), planned.sharded)
    try:
        hashes = _flat(world.hashes())
        ranks.check_same("weights, data or prompts", repr(hashes), "give every machine the same files")
        _tell_problems(world, emit)
        if run is not None:
            run.record_hashes(hashes)
            with suppress(UsageError):  # the row a killed run tore is cut when the loop resumes
                emit("history", rows=[row for row in run.read("metrics") if row["step"] < planned.every])

        def watched(kind: str, **payload: Any) -> None:
            halt.watch(kind, payload)
            emit(kind, **payload)

        def stop() -> bool:
            said = next((signal for signal in ranks.gather(halt.signal) if signal is not None), None)
            halt.signal = halt.signal or said  # one that came meanwhile is for the next step to heed, on all ranks
            return said is not None

        return train_loop(world, run, watched, stop, until), world.splits.dev[0].question
    finally:
        world.close()


def _example(recipe: Recipe) -> str | None:
    """A problem to try the players on, where finding one is cheap."""
    if recipe.data.type not in ("tiny", "jsonl"):
        return None
    from agon_cli import data

    with suppress(AgonError):
        return data.load(recipe).dev[0].question
    return None


def _flat(hashes: Row, prefix: str = "") -> dict[str, str]:
    """`{"base": {"A": …}}` as `{"base.A": …}`."""
    found: dict[str, str] = {}
    for name, value in hashes.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: str(value)}
    return found


def _tell_problems(world: World, emit: Emit, limit: int | None = None) -> None:
    """How many problems there are, of how many the first are used, and what became of the rows not among them."""
    emit("data", problems=world.splits.sizes(), rows=world.splits.counts, limit=limit)
    for text in world.splits.unpinned():
        emit("warning", text=text)
    for name, count in world.dropped.items():
        if count:
            limit = world.recipe.rollout.max_prompt_tokens
            emit("warning", text=f"{count} problems of the {name} split are left out: prompts over {limit} tokens")


def outcome(rows: Iterable[Row]) -> Row:
    """Before and after on the test split, from a run's evaluation rows: every arm at the first and the last step, and
    the cascade's direction as the dev split chose it at the last."""
    from agon_cli.evaluate import arms, choose

    figures = arms(rows)
    test = [arm for arm in figures if arm["split"] == "test"]
    first, last = min(arm["step"] for arm in test), max(arm["step"] for arm in test)
    before = {arm["arm"]: arm for arm in test if arm["step"] == first}
    return {
        "first": first,
        "last": last,
        "arms": [
            {"arm": arm["arm"], "mode": arm["mode"], "before": before.get(arm["arm"]), "after": arm}
            for arm in test
            if arm["step"] == last
        ],
        "chosen": choose([arm for arm in figures if arm["split"] == "dev" and arm["step"] == last]),
    }


@dataclass(frozen=True)
class Entrant:
    """What `agon eval` is to judge: a recipe with players in it, and where each one's adapter comes from."""

    what: str
    recipe: Recipe
    seats: dict[str, Found]
    step: int = 0


def entrant(source: str, overrides: Sequence[str], recipe_source: str | None) -> Entrant:
    """Tell what SOURCE names: a run folder; a recipe, which means its untrained base; a run's name; or a model, which
    takes the problems and prompts of `recipe_source`, else of the run it lies in, else of the newest run."""
    path = Path(source).expanduser()
    if recipe_source is not None and (is_run(path) or is_run(Path("runs", source)) or _is_recipe(source)):
        raise UsageError(
            f"{source} has a recipe of its own, so --recipe would do nothing", "use key.path=value instead"
        )
    if is_run(path):
        return _of_run(path, overrides)
    failure: AgonError
    try:
        return _untrained(source, load(source, overrides))
    except UsageError as error:
        failure = error
        if _is_recipe(source):
            raise
    if is_run(Path("runs", source)):
        return _of_run(Path("runs", source), overrides)
    if not (path.is_dir() or "/" in source or source.startswith("package:") or source.endswith(".gguf")):
        raise failure
    if source.endswith((".yaml", ".yml")):
        raise failure
    return _model(source, overrides, recipe_source)


def _is_recipe(source: str) -> bool:
    try:
        locate(source)
    except UsageError:
        return False
    return True


def _of_run(run: Path, overrides: Sequence[str]) -> Entrant:
    from agon_cli.players import of_run, recipe_of

    recipe = recipe_of(run, overrides)
    seats = {name: of_run(run, recipe, name) for name in recipe.cast}
    step = next(iter(seats.values())).step or 0
    return Entrant(f"the run {run} at step {step}", recipe, seats, step)


def _untrained(source: str, recipe: Recipe) -> Entrant:
    """A recipe's players without adapters; players on the same base are one and the same then."""
    from agon_cli.players import Found, with_players

    cascade = recipe.method.deploy == "cascade"
    bases = {recipe.model_of(name): name for name in reversed(recipe.cast)}
    if len(bases) == 1:
        seats = {"base": Found("base", recipe.model_of(recipe.cast[0]))}
        own = ", which as a cascade reads its own draft" if cascade else ""
        what = f"the untrained base of {source}{own}"
        return Entrant(what, with_players(recipe, seats, "moa" if cascade else "zero_shot"), seats)
    seats = {name: Found(name, recipe.model_of(name)) for name in recipe.cast}
    return Entrant(f"the untrained bases of {source}", with_players(recipe, seats, "agon"), seats)


def _model(source: str, overrides: Sequence[str], recipe_source: str | None) -> Entrant:
    from agon_cli.players import find, home_of, recipe_of, with_players

    if recipe_source is not None:
        context, whose = load(recipe_source, overrides), recipe_source
    else:
        run = home_of(Path(source).expanduser()) or _newest_run(source)
        context, whose = recipe_of(run, overrides), str(run)
    found = find(source, None, context)
    preset = "moa" if context.method.deploy == "cascade" else "zero_shot"
    seats = {"model": found}
    return Entrant(f"{source} on the problems and prompts of {whose}", with_players(context, seats, preset), seats)


def _newest_run(source: str) -> Path:
    try:
        return find_run()
    except UsageError:
        raise UsageError(
            f"{source} is a model, and there is no run whose problems and prompts it could be given",
            "name a recipe that has them: --recipe RECIPE",
        ) from None


def evaluate(who: Entrant, mode: str | None, split: str, limit: int | None, samples: int, emit: Emit) -> Row:
    """Figures of every arm on `split`, with the rows they come from. Where a cascade has several directions, the dev
    split is evaluated too, to choose one of them before looking at the test split."""
    from agon_cli.assemble import assemble
    from agon_cli.evaluate import arms, choose
    from agon_cli.evaluate import evaluate as rows_of
    from agon_cli.metrics import check_grading
    from agon_cli.players import take_seats

    mode = mode or who.recipe.method.deploy
    emit("phase", name="load")
    world = assemble(who.recipe, tell=lambda text: emit("warning", text=text))
    try:
        take_seats(world.policy, world.arena, world.telling_prompts(), who.seats)
        _tell_problems(world, emit, limit)
        rows: list[Row] = []
        spent: list[Row] = []
        for part in ["dev", "test"] if split == "test" and mode == "cascade" and len(who.recipe.cast) > 1 else [split]:
            problems = getattr(world.splits, part)[:limit]
            made = rows_of(world.arena, problems, part, who.step, mode, samples, lambda name: emit("phase", name=name))
            rows, spent = rows + made.rows, spent + made.spent
    finally:
        world.close()
    figures = arms(rows)
    check_grading(sum(arm["grader_errors"] for arm in figures), len(rows))
    return {
        "what": who.what, "split": split, "step": who.step, "mode": mode, "samples": samples,
        "arms": [arm for arm in figures if arm["split"] == split],
        "chosen": choose([arm for arm in figures if arm["split"] == "dev"]),
        "dev_arms": [arm for arm in figures if arm["split"] == "dev" and split != "dev"],
        "spent": spent, "rows": rows,
    }  # fmt: skip


def failure(error: BaseException) -> AgonError | None:
    """The error a user can act on behind any exception; None for a bug."""
    if isinstance(error, AgonError):
        return error
    if isinstance(error, Terminated):
        return Stopped("terminated", "", Exit.SIGTERM)
    if isinstance(error, KeyboardInterrupt):
        return Stopped("interrupted", "", Exit.SIGINT)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return ResourceError(f"disk full: {error.filename or ''} {error.strerror}", "free some space and run it again")
    if is_out_of_memory(error):
        first = str(error).strip().partition("\n")[0]
        hint = "lower optim.micro_batch_tokens or, of engine hf, engine.batch_tokens, and go on: results stay the same"
        return ResourceError(f"out of memory{': ' if first else ''}{first}", hint)
    return None
