"""Sampling with vLLM in processes of its own on this machine, one for each base; adapters are copied to it and live."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from agon_cli import models
from agon_cli.engines.copies import Version, Versions, check_room, checked, rank_room, vocabulary
from agon_cli.errors import MachineError, MissingExtra, ResourceError, UsageError
from agon_cli.memory import release
from agon_cli.policy import Policy, Seat
from agon_cli.recipe.engine import VLLM
from agon_cli.recipe.schema import Model, Recipe
from agon_cli.types import Completion, Prompt, Sampling

CPU_CACHE_BYTES = 4 << 30
"""Key-value cache on a machine without a GPU; $VLLM_CPU_KVCACHE_SPACE (GiB) overrides it."""


@dataclass
class _Base:
    """One base in vLLM. `loaded` holds the version of each player that it has; `asleep` is whether its memory is given
    back."""

    llm: Any
    watch: subprocess.Popen[bytes]
    loaded: dict[str, Version] = field(default_factory=dict)
    asleep: bool = False


class VLLMEngine:
    """Samples with vLLM beside the training model: every player of a base has a slot there.

    A publish writes the adapter out; vLLM takes it up at the next sample, under an id that no other version had, after
    the older one is unloaded. Between `rest` and the next sample a GPU gets back the key-value cache and the copy of
    the base (sleep level 1; level 2 would lose the base under adapters).
    """

    def __init__(self, policy: Policy, recipe: Recipe, scratch: Path | None = None) -> None:
        assert isinstance(recipe.engine, VLLM)
        _check(recipe)
        self.policy = policy
        self._room = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
        self._known = {name: vocabulary(seat) for name, seat in policy.seats.items()}
        self._versions = Versions(policy, scratch)
        self._bases: dict[Model, _Base] = {}
        try:
            crews: dict[Model, int] = {}
            for name in policy.seats:
                model = recipe.model_of(name)
                crews[model] = crews.get(model, 0) + 1
            for model, players in crews.items():
                share = recipe.engine.memory / len(crews)
                llm = _start(model, players, recipe.lora.rank, self._room, share)
                self._bases[model] = _Base(llm, _outlived_by_none(llm))
            self._home = {name: self._bases[recipe.model_of(name)] for name in policy.seats}
            for name in policy.seats:
                self.publish(name)
        except BaseException:
            self.close()
            raise

    def publish(self, player: str) -> None:
        """The next sample uses the adapter as it is now; refuses an unknown player."""
        self.policy.seats[player]
        older = self._versions.newest.get(player)
        self._versions.write(player)
        if older is not None and self._home[player].loaded.get(player) is not older:
            self._versions.drop(older)  # it was never taken up

    def sample(
        self, prompts: Sequence[Prompt], player: str, sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """For prompt p one completion per seed in `seeds[p]`, in order; log-probabilities are at temperature 1.

        Raises UsageError for a prompt that leaves too little room, ResourceError when vLLM's process has died.
        """
        seat, base = self.policy.seats[player], self._home[player]
        check_room(prompts, sampling, self._room)
        rows = [(prompt, seed) for prompt, row in zip(prompts, seeds, strict=True) for seed in row]
        if not rows:
            return [[] for _ in prompts]
        with _dying():
            lora = self._take_up(player, base)
            outputs = base.llm.generate(
                [{"prompt_token_ids": list(prompt.ids)} for prompt, _ in rows],
                [_params(seat, sampling, seed) for _, seed in rows],
                lora_request=lora,
                use_tqdm=False,
            )
        completions = (self._completion(seat, player, output, sampling) for output in outputs)
        return [[next(completions) for _ in row] for row in seeds]

    def _completion(self, seat: Seat, player: str, output: Any, sampling: Sampling) -> Completion:
        (sampled,) = output.outputs
        ids = list(sampled.token_ids)
        logprobs = [step[token].logprob for token, step in zip(ids, sampled.logprobs, strict=True)]
        return checked(seat, ids, logprobs, sampling, self._known[player], "vLLM")

    def _take_up(self, player: str, base: _Base) -> Any:
        """Wake the base and give it the player's newest version in place of the one it has; vLLM's name for it."""
        from vllm.lora.request import LoRARequest

        if base.asleep:
            release()  # else what torch keeps of the update's memory is not vLLM's to take back
            base.llm.wake_up()
            base.asleep = False
        version, older = self._versions.newest[player], base.loaded.get(player)
        request = LoRARequest(version.name, version.number, str(version.folder))
        if older is not version:
            if older is not None:
                base.llm.llm_engine.remove_lora(older.number)
                del base.loaded[player]
                self._versions.drop(older)
            base.llm.llm_engine.add_lora(request)
            base.loaded[player] = version
        return request

    def origins(self, player: str) -> list[str]:
        """The engine alone."""
        return ["the engine"]

    def rest(self) -> None:
        """Give the GPU back the cache and the copy of the base until the next sample; a CPU has nothing to give."""
        if torch.cuda.is_available():
            for base in self._bases.values():
                if not base.asleep:
                    base.llm.sleep(level=1)
                    base.asleep = True

    def close(self) -> None:
        """End vLLM's processes and delete the adapters. Safe to call twice."""
        for base in self._bases.values():
            base.watch.kill()
            base.watch.communicate()
            base.llm.llm_engine.engine_core.shutdown()
        self._bases.clear()
        self._versions.close()


def _check(recipe: Recipe) -> None:
    """Find what cannot work before anything heavy is loaded."""
    rank_room(recipe.lora.rank)
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("engine.type vllm needs the vllm extra", "vllm", "; or use engine.type=hf")
    if not torch.cuda.is_available():
        for name in recipe.cast:
            if recipe.model_of(name).quantization is not None:
                raise MachineError(
                    f"player {name}: vLLM has 4-bit bases on a GPU alone",
                    "use engine.type=hf, or model.quantization=null",
                )


def _params(seat: Seat, sampling: Sampling, seed: int) -> Any:
    """vLLM's sampling parameters with every field that shapes a sample written out."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop=None,
        stop_token_ids=list(seat.stop_ids),
        ignore_eos=False,
        bad_words=None,
        logit_bias=None,
        allowed_token_ids=None,
        logprobs=0,  # of the sampled token alone
        prompt_logprobs=None,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _start(model: Model, players: int, rank: int, room: int, share: float) -> Any:
    """vLLM with the base loaded and a slot for each player. Raises MachineError when it does not start."""
    place = models.locate(model.id)
    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "model": place.source,
        "revision": place.revision,
        "tokenizer_revision": place.revision,
        "dtype": model.dtype,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "max_model_len": room,
        "enable_lora": True,
        "max_loras": players,
        "max_lora_rank": rank_room(rank),
        "enable_prefix_caching": True,
        "enable_sleep_mode": gpu,
        "enforce_eager": not gpu,
        "seed": 0,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if model.quantization == "nf4":
        options["quantization"] = "bitsandbytes"
    if not gpu:
        # vLLM 0.32 dies on a CPU where it cuts a prompt in two and the request has a seed: that it never does then.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(room, 8192)}
    if gpu:
        options["gpu_memory_utilization"] = share
    elif not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        options["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    with _quietly():
        try:
            return _deaf_to_ctrl_c(lambda: _import_llm()(**options))
        except Exception as error:
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise MachineError(
                f"vLLM does not start with {model.id}: {first}",
                "set VLLM_LOGGING_LEVEL=INFO to see why; engine.memory says how much of the GPU it may take, and "
                "engine.type=hf needs no vLLM",
            ) from error


def _import_llm() -> Any:
    from vllm import LLM

    return LLM


def _deaf_to_ctrl_c(make: Callable[[], Any]) -> Any:
    """What `make` returns. The processes it starts never hear of a Ctrl-C, which a terminal sends to all at once: the
    step under way still needs them. They inherit that from a thread, so this one can be interrupted meanwhile."""
    made: list[Any] = []
    failed: list[Exception] = []

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            made.append(make())
        except Exception as error:
            failed.append(error)

    resource_tracker.ensure_running()  # the first start of it would unblock the signal again
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _outlived_by_none(llm: Any) -> subprocess.Popen[bytes]:
    """A process that ends vLLM's when this one is gone, however that came about: kill -9 would leave them behind, with
    all the memory they hold. Killed itself, it does nothing."""
    pids = [str(process.pid) for process in llm.llm_engine.engine_core.resources.engine_manager.processes]
    script = 'read -r _; kill -TERM "$@"; sleep 10; kill -KILL "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *pids],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Set up what vLLM's processes inherit: their talk goes to stderr, for stdout belongs to results; nobody's use is
    reported to anyone; this rank's GPU is theirs, and of other ranks they know nothing. What vLLM itself adds to our
    environment is taken out again."""
    before = dict(os.environ)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    os.environ |= quiet | before | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if torch.cuda.is_available():
        place, named = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = named.split(",")[place] if named else str(place)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.environ.clear()
        os.environ |= before


@contextmanager
def _dying() -> Iterator[None]:
    """Turn the death of vLLM's process, or an adapter that it refuses, into an error that says what to do."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise ResourceError(
            "vLLM's own process has died, most often for lack of memory",
            "lower engine.memory or rollout.max_tokens; VLLM_LOGGING_LEVEL=INFO shows its last words",
        ) from error
    except ValueError as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(f"vLLM refuses the request: {first}", "engine.type=hf samples without vLLM") from error
