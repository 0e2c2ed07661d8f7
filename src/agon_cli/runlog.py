"""The run folder: one run's recipe, manifest and append-only logs, held by one process at a time.

    recipe.yaml, recipe.resolved.json   as given, and after overrides and presets
    manifest.json                       versions, seed, hashes, hardware, argv of the first start; one entry per resume
    metrics.jsonl, rollouts.jsonl, evals.jsonl, inference.jsonl
    checkpoints/ and one link per player   (see checkpoint)
    .lock                               held by the process that trains; holds its pid

A run resumes only under the inputs and the recipe it began with; of the latter, values of memory may be others by then.
Rows are whole lines of compact ASCII JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from agon_cli.errors import DISK_FULL, ResourceError, UsageError

Log = Literal["metrics", "rollouts", "evals", "inference"]
LOGS: tuple[Log, ...] = get_args(Log)

_RECIPE, _RESOLVED, _MANIFEST, _LOCK = "recipe.yaml", "recipe.resolved.json", "manifest.json", ".lock"
_CHECKPOINTS = "checkpoints"
_ELSEWHERE = "choose another folder with --out"

_open_runs: weakref.WeakSet[RunFolder] = weakref.WeakSet()


class RunFolder:
    """An open run: its folder, whether it existed (`resumed`), and what manifest.json holds.

    A context manager that gives the lock back at its end. Methods that write raise ResourceError when the disk is full.
    """

    def __init__(self, path: Path, lock: int) -> None:
        """Use `open`: it checks the folder and takes the lock whose file descriptor this is."""
        self.path = path
        self.resumed = False
        self.manifest: dict[str, Any] = {}
        self._lock = lock
        self._logs: dict[Log, int] = {}
        _open_runs.add(self)

    @classmethod
    def open(
        cls, path: Path, recipe_text: str, resolved: Mapping[str, Any], manifest: Mapping[str, Any], fresh: bool
    ) -> RunFolder:
        """Start a run in `path`, or take up the one that is there; `fresh` deletes that one first.

        `resolved` is the complete recipe, `manifest` comes from `describe`. Raises UsageError, leaving all as it was,
        when the folder holds a run of another recipe or inputs, is in use, holds anything else, or is read-only.
        """
        complete = json.loads(json.dumps(resolved))
        _refuse_names(complete.get("players", {}))
        _refuse_foreign(path)
        with _disk(path, "cannot be used as a run folder"):
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, _take_lock(path))
        try:
            with _disk(path, "cannot be used as a run folder"):
                if fresh and is_run(path):
                    _wipe(path)
                run.resumed = has_begun(path)
                if run.resumed:
                    run._take_up(complete, dict(manifest))
                else:
                    run._begin(recipe_text, complete, dict(manifest))
                for name in LOGS:
                    run._logs[name] = os.open(path / f"{name}.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except BaseException:
            run.close()
            raise
        return run

    def _begin(self, recipe_text: str, resolved: dict[str, Any], manifest: dict[str, Any]) -> None:
        # The manifest comes last: a folder without it has not begun, and the next start writes it all again.
        self.manifest = manifest
        _replace(self.path / _RESOLVED, json.dumps(resolved, indent=2) + "\n")
        _replace(self.path / _RECIPE, recipe_text)
        self._write_manifest()

    def _take_up(self, resolved: dict[str, Any], manifest: dict[str, Any]) -> None:
        changes = _refuse_recipe(self.path, resolved)
        self.manifest = _object(self.path / _MANIFEST)
        for key, kind, name in (("hashes", dict, "an object"), ("resumed", list, "a list")):
            if not isinstance(self.manifest.get(key, kind()), kind):
                hint = f"put the file back, {_ELSEWHERE}, or discard the run with --fresh"
                raise UsageError(f"{self.path / _MANIFEST}: {key!r} is not {name}", hint)
        self._refuse_hashes(manifest.get("hashes", {}))
        entry = {key: value for key, value in manifest.items() if key != "hashes" and value != self.manifest.get(key)}
        self.manifest.setdefault("resumed", []).append(entry | ({"recipe": changes} if changes else {}))
        self._write_manifest()
        if changes:
            _replace(self.path / _RESOLVED, json.dumps(resolved, indent=2) + "\n")

    def _refuse_hashes(self, hashes: Mapping[str, str]) -> None:
        known = self.manifest.get("hashes", {})
        changed = sorted(name for name, value in hashes.items() if known.get(name, value) != value)
        if changed:
            raise UsageError(
                f"{self.path}: not what this run began with: {', '.join(changed)}",
                f"put back what has changed, {_ELSEWHERE}, or discard the old run with --fresh",
            )

    def _write_manifest(self) -> None:
        with _disk(self.path / _MANIFEST, "cannot be written"):
            _replace(self.path / _MANIFEST, json.dumps(self.manifest, indent=2) + "\n")

    def record_hashes(self, hashes: Mapping[str, str]) -> None:
        """Add hashes known only once models and data are loaded. Raises UsageError when the run began with others."""
        self._refuse_hashes(hashes)
        known = self.manifest.get("hashes", {})
        if not hashes.keys() <= known.keys():
            self.manifest["hashes"] = known | dict(hashes)
            self._write_manifest()

    def append(self, name: Log, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a log, in one write to the operating system. Numbers that are not finite become null."""
        data = "".join(_line(row) for row in rows).encode()
        handle = self._logs[name]
        before = os.fstat(handle).st_size
        with _disk(self.path / f"{name}.jsonl", "cannot be written"):
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(handle, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, before)  # half a line would make every reader fail
                raise

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, all of them on the disk by now. Take this before a checkpoint is saved."""
        for name, handle in self._logs.items():
            with _disk(self.path / f"{name}.jsonl", "cannot be written"):
                os.fsync(handle)
        return {name: os.fstat(handle).st_size for name, handle in self._logs.items()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Cut each log to the size a checkpoint recorded, one not named to nothing. Raises UsageError, before any cut,
        when one is shorter than recorded or was edited."""
        for name, handle in self._logs.items():
            size, present = sizes.get(name, 0), os.fstat(handle).st_size
            path = self.path / f"{name}.jsonl"
            hint = "put the file back, or discard the run with --fresh"
            if not 0 <= size <= present:
                raise UsageError(f"{path} has {present} bytes, but the checkpoint was saved when it had {size}", hint)
            if size and os.pread(handle, 1, size - 1) != b"\n":
                raise UsageError(f"{path} was changed: no line ends at byte {size}, where a checkpoint was saved", hint)
        for name, handle in self._logs.items():
            with _disk(self.path / f"{name}.jsonl", "cannot be cut"):
                os.ftruncate(handle, sizes.get(name, 0))
                os.fsync(handle)

    def read(self, name: Log) -> Iterator[dict[str, Any]]:
        """The rows of a log, as the function `read` gives them."""
        return read(self.path, name)

    def close(self) -> None:
        """Close the logs and give the lock back. Safe to call twice."""
        handles = [*self._logs.values(), self._lock]
        self._logs, self._lock = {}, -1
        for handle in handles:
            with contextlib.suppress(OSError):
                os.close(handle)
        _open_runs.discard(self)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forget_in_child() -> None:
    for run in list(_open_runs):
        run.close()


# A forked worker shares the lock's open file: one that outlives a killed run would keep the run locked.
os.register_at_fork(after_in_child=_forget_in_child)


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return os.path.isfile(path / _MANIFEST) and os.path.isfile(path / _RESOLVED)


def has_begun(path: Path) -> bool:
    """Whether a run has logged or saved anything; one that failed before may start again with another recipe."""
    logs = (path / f"{name}.jsonl" for name in LOGS)
    return is_run(path) and (any(path.glob(f"{_CHECKPOINTS}/*")) or any(p.exists() and p.stat().st_size for p in logs))


def check(path: Path, resolved: Mapping[str, Any], fresh: bool) -> None:
    """Raises the UsageError that `RunFolder.open` would for a player's name, for what else is in the folder, or for a
    run of another recipe. Writes nothing, and does not ask whether the run is in use."""
    _refuse_names(resolved.get("players", {}))
    _refuse_foreign(path)
    if not fresh and has_begun(path):
        _refuse_recipe(path, json.loads(json.dumps(resolved)))


def find_run(path: Path | None = None, runs: Path = Path("runs")) -> Path:
    """The run at `path`, or named so under `runs`; without `path`, the run under `runs` that last made progress.

    Raises UsageError when there is none.
    """
    if path is not None:
        for candidate in (path, runs / path):
            if is_run(candidate):
                return candidate
        raise UsageError(f"{path} is no run", "name a folder that `agon train` wrote" + _known(runs))
    found = [folder.parent for folder in runs.glob(f"*/{_RESOLVED}") if has_begun(folder.parent)]
    if not found:
        raise UsageError(f"there is no run under {runs}/", "train one first: agon train tiny; or name one with --run")
    return max(found, key=lambda run: (_progress(run), run.name))


def _progress(run: Path) -> int:
    """When a run last got further, in nanoseconds: its newest start, checkpoint or row of metrics."""
    marks = [run / _MANIFEST, run / "metrics.jsonl", *run.glob(f"{_CHECKPOINTS}/step-*/COMPLETE")]
    return max(mark.stat().st_mtime_ns for mark in marks if mark.exists() and mark.stat().st_size)


def _known(runs: Path) -> str:
    names = sorted(folder.parent.name for folder in runs.glob(f"*/{_RESOLVED}"))
    return f"; under {runs}/ there are: " + ", ".join(names) if names else ""


class _Values(dict[str, Any]):
    """A JSON object of a log. A key that a reader needs and it lacks is the file's fault, and told as such."""

    def __init__(self, place: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._place = place

    def __missing__(self, key: str) -> NoReturn:
        hint = "it was edited, or another version wrote it: put the file back, or discard the run with --fresh"
        raise UsageError(f"{self._place}: no {key!r} where one belongs", hint)


def read(run: Path, name: Log) -> Iterator[dict[str, Any]]:
    """The rows of a run's log, in order. Raises UsageError naming file and line where one is not a JSON object; so does
    a row that is asked for a key it lacks."""
    path = run / f"{name}.jsonl"
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "name a folder that `agon train` wrote") from error
    with file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line, object_hook=partial(_Values, f"{path}:{number}"))
            except (ValueError, RecursionError) as error:
                raise _bad_row(path, number, f"not JSON: {error}") from error
            if not isinstance(row, dict) or not line.endswith(b"\n"):
                raise _bad_row(path, number, "not a JSON object on a line of its own")
            yield row


def _bad_row(path: Path, number: int, what: str) -> UsageError:
    hint = "a run that was killed can leave half a row: the command that trains it cuts it and goes on"
    return UsageError(f"{path}:{number}: {what}", hint)


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(row), separators=(",", ":"), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _object(path: Path) -> dict[str, Any]:
    hint = f"{_ELSEWHERE}, or discard the run with --fresh"
    try:
        value = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}", hint) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}", hint) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object", hint)
    return value


def _refuse_recipe(path: Path, resolved: dict[str, Any]) -> list[str]:
    """What a run goes on with in place of what it had: values of memory. Raises UsageError where others differ too."""
    from agon_cli.recipe import OF_MEMORY, differences  # commands that only read logs need no recipe reader

    before = _object(path / _RESOLVED)
    if refused := differences(before, resolved, OF_MEMORY):
        more = [f"and {len(refused) - 20} more"] if len(refused) > 20 else []
        listed = "".join(f"\n  {change}" for change in [*refused[:20], *more])
        hint = f"{_ELSEWHERE}, or discard the old run with --fresh"
        raise UsageError(f"{path} holds a run of a different recipe:{listed}", hint)
    return differences(before, resolved)


def _refuse_names(players: Iterable[str]) -> None:
    """Refuse names that would collide as a link in the run folder or a folder in a checkpoint, case aside."""
    seen: dict[str, str] = {_CHECKPOINTS: "a folder of every run", "complete": "a file of every checkpoint"}
    for name in players:
        if name.casefold() in seen:
            raise UsageError(f"a player cannot be called {name!r}: that is {seen[name.casefold()]}", "rename it")
        seen[name.casefold()] = f"player {name!r} already, on some file systems"


def _refuse_foreign(path: Path) -> None:
    """Refuse a path that is no folder, or a folder with anything but a run in it."""
    with _disk(path, "cannot be used as a run folder"):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file, not a folder", _ELSEWHERE)
        if not path.exists() or is_run(path):
            return
        names = {name for name in os.listdir(path) if name != _LOCK and not (name[0] == "." and name.endswith(".new"))}
        half_begun = names == {_RESOLVED} or names == {_RESOLVED, _RECIPE}
        if names and not half_begun:
            some = ", ".join(sorted(names)[:3])
            raise UsageError(f"{path} is not empty and holds no run (there is {some})", _ELSEWHERE)


def _take_lock(path: Path) -> int:
    """The descriptor of the run's lock, which the operating system gives back whatever way the process ends."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        pid = os.pread(lock, 20, 0).strip()
        os.close(lock)
        owner = f"process {pid.decode()}" if pid.isdigit() else "another process"
        raise UsageError(f"{path} is in use by {owner}", f"wait until it ends, stop it, or {_ELSEWHERE}") from error
    except OSError:
        os.close(lock)
        raise
    return lock


def _wipe(path: Path) -> None:
    """Delete a run, and nothing else, in an order in which a kill half-way leaves one that can be resumed or begun."""
    checkpoints = path / _CHECKPOINTS
    if checkpoints.is_dir():
        for folder in sorted(checkpoints.iterdir(), reverse=True):
            if folder.is_symlink():
                folder.unlink()
            elif folder.name.startswith(("step-", ".aside-")) and folder.is_dir():
                (folder / "COMPLETE").unlink(missing_ok=True)
                shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            checkpoints.rmdir()  # stays when there is anything else in it, or when it is a link to another disk
    for entry in path.iterdir():
        if entry.is_symlink() and Path(os.readlink(entry)).parts[:1] == (_CHECKPOINTS,):
            entry.unlink()
    for name in [*(f"{log}.jsonl" for log in LOGS), "report.html", _MANIFEST, _RECIPE, _RESOLVED]:
        (path / name).unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a kill leaves the old one or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    with open(fresh, "wb") as file:
        file.write(text.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


@contextlib.contextmanager
def _disk(path: Path, what: str) -> Iterator[None]:
    """Turn an operating system's error about a path into one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            hint = "free some space; the same command then goes on from the newest checkpoint"
            raise ResourceError(f"disk full: {path}: {error.strerror}", hint) from error
        where = "" if error.filename in (None, str(path)) else f" ({error.filename})"
        raise UsageError(f"{path} {what}: {error.strerror}{where}", f"make it writable, or {_ELSEWHERE}") from error
