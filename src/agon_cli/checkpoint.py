"""Checkpoints that survive a kill at any moment: written aside, synced, renamed, and marked COMPLETE last.

    checkpoints/step-000200/
      A/adapter_model.safetensors, A/adapter_config.json   a plain PEFT adapter folder, one per player
      A.optimiser.safetensors                              optimiser state, outside the plain PEFT folder
      state.json                                           step, players, size of each log, optimiser settings
      COMPLETE                                             size and SHA-256 of every file above, as JSON
    A -> checkpoints/step-000200/A                         in the run folder: the newest of each player

Only safetensors and JSON are read or written: a checkpoint from a stranger cannot run code. One process saves at a time
(the run folder's lock sees to it), so whatever temporary folder a save finds belongs to a process that died.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from agon_cli.errors import DISK_FULL, AgonError, ResourceError, UsageError

COMPLETE = "COMPLETE"
_STATE = "state.json"
_VERSION = 1
_PLAYER = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
_FILE = re.compile(rf"state\.json|{_PLAYER}(/adapter_(model\.safetensors|config\.json)|\.optimiser\.safetensors)")
_FOLDER = re.compile(r"step-([0-9]{6,12})(\.replaced)?")
"""`.replaced` is a whole checkpoint set aside while the same step is saved again."""
_ASIDE = ".aside-"
"""Prefix of folders being written or being removed; never read."""
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


@dataclass(frozen=True)
class PlayerState:
    """All that one player owns: its adapter under PEFT's file keys, and its optimiser."""

    adapter: dict[str, Tensor]
    adapter_config: dict[str, Any]
    """What PEFT writes to adapter_config.json. Sets are written as sorted lists."""
    optimiser: dict[str, Tensor]
    """Flat names such as `exp_avg.<parameter>`."""
    optimiser_meta: dict[str, Any]
    """Whatever of the optimiser is not a tensor; JSON values."""


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of optimiser step `step`, from which it can go on."""

    step: int
    players: dict[str, PlayerState]
    log_sizes: dict[str, int]
    """Bytes of each JSONL log at this moment; rows past them are cut on resume."""


def save(folder_checkpoints: Path, snapshot: Snapshot, keep: int = 2) -> Path:
    """Write `snapshot`, point the run folder's link of each player at it, drop checkpoints beyond the newest `keep`.

    Returns the checkpoint's folder, which is on the disk (synced) by then. At every moment before, the previous one is
    whole. Raises ResourceError when the disk is full, UsageError when the folder cannot be written.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    for name in snapshot.players:
        if not re.fullmatch(_PLAYER, name) or name.casefold() in ("complete", folder_checkpoints.name.casefold()):
            raise UsageError(f"a player cannot be called {name!r}", "use a short name of letters, digits, - and _")
    files = _files(snapshot)
    target = folder_checkpoints / f"step-{snapshot.step:06d}"
    try:
        folder_checkpoints.mkdir(parents=True, exist_ok=True)
        _sweep(folder_checkpoints)
        _write(target, files)
    except OSError as error:
        raise _disk_error(error, target, sum(map(len, files.values()))) from error
    try:
        for name in snapshot.players:
            _point(folder_checkpoints.parent / name, Path(folder_checkpoints.name, target.name, name))
        _sync_folder(folder_checkpoints.parent)
    except OSError as error:
        raise _disk_error(error, target, 0) from error
    _prune(folder_checkpoints, target, keep)
    return target


def newest(folder_checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, or None; and one sentence for each newer one that is torn or corrupt.

    Every file is hashed, so a whole one is whole to the bit. Raises UsageError when the folder cannot be listed.
    """
    skipped: list[str] = []
    for path in _listed(folder_checkpoints):
        flaw = _flaw(path)
        if flaw is None:
            return path, skipped
        skipped.append(f"checkpoint {path} is skipped: {flaw}")
    return None, skipped


def load(path: Path) -> Snapshot:
    """The snapshot in a checkpoint folder, on the CPU. Raises UsageError when it is torn or corrupt."""
    flaw = _flaw(path)
    if flaw is not None:
        raise UsageError(f"checkpoint {path} cannot be used: {flaw}", "use an older one, or start over with --fresh")
    try:
        state = _json(path / _STATE)
        players = {
            name: PlayerState(
                adapter=_tensors(path / name / "adapter_model.safetensors"),
                adapter_config=_json(path / name / "adapter_config.json"),
                optimiser=_tensors(path / f"{name}.optimiser.safetensors"),
                optimiser_meta=meta,
            )
            for name, meta in state["players"].items()
        }
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UsageError(f"checkpoint {path} cannot be read: {error}", "run the command again") from error
    return Snapshot(step=state["step"], players=players, log_sizes=state["log_sizes"])


def _tensors(path: Path) -> dict[str, Tensor]:
    # Cloned: the file's mapping is not aligned as torch allocates, and some CPU kernels round differently by alignment,
    # which would break bit-identical resume; a clone also outlives the file.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _files(snapshot: Snapshot) -> dict[str, bytes]:
    """Every file but COMPLETE, by its path inside the checkpoint. The same snapshot gives the same bytes."""
    files: dict[str, bytes] = {}
    for name, player in snapshot.players.items():
        files[f"{name}/adapter_model.safetensors"] = _pack(player.adapter)
        files[f"{name}/adapter_config.json"] = _dump(player.adapter_config)
        files[f"{name}.optimiser.safetensors"] = _pack(player.optimiser)
    files[_STATE] = _dump(
        {
            "version": _VERSION,
            "step": snapshot.step,
            "log_sizes": snapshot.log_sizes,
            "players": {name: player.optimiser_meta for name, player in snapshot.players.items()},
        }
    )
    return files


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    # Cloned because safetensors refuses tensors that are views of one storage, which flat parameter buffers are.
    own = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return bytes(to_bytes(own, metadata={"format": "pt"}))


def _dump(value: Any) -> bytes:
    def plain(item: Any) -> Any:
        if isinstance(item, set | frozenset):
            return sorted(item)
        raise TypeError(f"{type(item).__name__} does not go into a checkpoint's JSON")

    return json.dumps(value, indent=2, allow_nan=False, default=plain).encode()


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _write(target: Path, files: Mapping[str, bytes]) -> None:
    """Write the files aside, rename the folder into place, mark it COMPLETE; on a failure leave all as it was."""
    aside = target.with_name(f"{_ASIDE}{target.name}")
    replaced = target.with_name(f"{target.name}.replaced")
    renamed = False
    try:
        aside.mkdir()
        for folder in sorted({(aside / name).parent for name in files} - {aside}):
            folder.mkdir()
        for name, content in files.items():
            _write_synced(aside / name, content)
        for folder in {(aside / name).parent for name in files} | {aside}:
            _sync_folder(folder)
        if target.exists():
            _set_aside(target, replaced)
        os.rename(aside, target)
        renamed = True
        _sync_folder(target.parent)
        seal = {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()}
        _write_synced(target / f".{COMPLETE}", _dump({"files": seal}))
        os.rename(target / f".{COMPLETE}", target / COMPLETE)
        _sync_folder(target)
    except BaseException:
        with contextlib.suppress(OSError):
            if renamed:
                _remove(target)
            if replaced.exists() and not target.exists():
                os.rename(replaced, target)
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _set_aside(target: Path, replaced: Path) -> None:
    """Make room for a second save of the same step. A whole first one stays readable until the second is COMPLETE."""
    if _flaw(target) is not None:
        _remove(target)
        return
    _remove(replaced)
    os.rename(target, replaced)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def _point(link: Path, to: Path) -> None:
    """Make `link` a symbolic link to `to`, in one step; something of the user's under that name is not overwritten."""
    if os.path.lexists(link) and not link.is_symlink():
        raise FileExistsError(errno.EEXIST, "something that is no link is in the way", str(link))
    fresh = link.with_name(f".{link.name}.link")
    fresh.unlink(missing_ok=True)
    os.symlink(to, fresh)
    os.replace(fresh, link)


def _listed(folder: Path) -> list[Path]:
    """Checkpoint folders, whole or not, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}", "check the path and its permissions") from error
    matches = [match for match in map(_FOLDER.fullmatch, names) if match]
    matches.sort(key=lambda match: (int(match[1]), match[2] is None), reverse=True)
    return [folder / match[0] for match in matches]


def _flaw(path: Path, hashes: bool = True) -> str | None:
    """Why a checkpoint cannot be trusted; None when it is whole. Without `hashes` only names and sizes are compared."""
    try:
        seal = _json(path / COMPLETE)["files"]
        for name, entry in seal.items():
            if not _FILE.fullmatch(name):
                return f"{COMPLETE} lists {name!r}, which no checkpoint holds"
            flaw = _file_flaw(path / name, entry["size"], entry["sha256"] if hashes else None)
            if flaw is not None:
                return f"{name} {flaw}"
        return _state_flaw(path, set(seal))
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(path)
        why = " (the save was cut short, or is still going on)" if missing == Path(COMPLETE) else ""
        return f"{missing} is missing{why}"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{COMPLETE} or {_STATE} is not what a save writes"


def _file_flaw(path: Path, size: int, sha256: str | None) -> str | None:
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        return "is not a file"
    if info.st_size != size:
        return f"has {info.st_size} bytes instead of {size}"
    if sha256 is None:
        return None
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return None if digest.hexdigest() == sha256 else "does not have the content that was saved"


def _state_flaw(path: Path, sealed: set[str]) -> str | None:
    if _STATE not in sealed:
        return f"{COMPLETE} does not list {_STATE}"
    state = _json(path / _STATE)
    if state["version"] != _VERSION:
        return f"it has layout {state['version']!r}; this agon reads layout {_VERSION}"
    if not re.fullmatch(rf"step-0*{state['step']:d}(\.replaced)?", path.name):
        return f"{_STATE} is of step {state['step']:d}"
    if not all(isinstance(meta, dict) for meta in state["players"].values()):
        return f"{_STATE} lacks optimiser settings"
    if not all(isinstance(size, int) for size in state["log_sizes"].values()):
        return f"{_STATE} has a log size that is no number"
    needed = {_STATE}
    for name in state["players"]:
        needed |= {f"{name}/adapter_model.safetensors", f"{name}/adapter_config.json", f"{name}.optimiser.safetensors"}
    odd = sorted(needed ^ sealed)
    return f"{COMPLETE} and {_STATE} disagree on {odd[0]}" if odd else None


def _prune(folder: Path, saved: Path, keep: int) -> None:
    """Remove what a new COMPLETE checkpoint makes superfluous; a failure to remove is left to the next save."""
    with contextlib.suppress(OSError):
        others = [path for path in _listed(folder) if path != saved]
        whole = [path for path in others if path.suffix != ".replaced" and _flaw(path, hashes=False) is None]
        kept = _linked(folder) | {path.name for path in whole[: keep - 1]}
        for path in others:
            if path.name not in kept:
                _remove(path)


def _linked(folder: Path) -> set[str]:
    """Names of the checkpoints that a link of the run folder points into."""
    links = [Path(os.readlink(entry.path)) for entry in os.scandir(folder.parent) if entry.is_symlink()]
    return {link.parts[1] for link in links if len(link.parts) > 1 and link.parts[0] == folder.name}


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill half-way cannot leave something that looks like one."""
    doomed = path.with_name(f"{_ASIDE}gone-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Clear what saves that died have left."""
    for name in os.listdir(folder):
        if name.startswith(_ASIDE):
            shutil.rmtree(folder / name, ignore_errors=True)


def _disk_error(error: OSError, target: Path, size: int) -> AgonError:
    """The error a user can act on, which names the checkpoint that training goes on from."""
    whole = None
    with contextlib.suppress(AgonError, OSError):
        whole, _ = newest(target.parent)
    rest = "there is no earlier checkpoint: the same command starts from step 0"
    if whole is not None:
        rest = f"nothing is lost: {whole} is whole, and the same command goes on from it"
    where = error.filename or target
    if error.errno in DISK_FULL:
        needed = f" ({size / 1e6:.1f} MB needed)" if size else ""
        return ResourceError(f"disk full while saving {target}{needed}: {error.strerror}", f"free some space; {rest}")
    if error.errno in _REFUSED:
        return UsageError(f"cannot save {target}: {where}: {error.strerror}", f"make room for it there; {rest}")
    return ResourceError(f"cannot save {target}: {where}: {error.strerror}", rest)
