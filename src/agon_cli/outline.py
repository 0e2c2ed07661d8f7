"""A recipe's models without their weights, and what work on them would hold in memory.

A model is built from its configuration on tensors that have a shape and a type but no storage. On it the project's own
forward and backward pass runs, and every tensor it makes is counted from its birth to its death. So these figures
follow the code: what a layer keeps for its gradient is never written down a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, masking_utils

from agon_cli import lora, models, norms, wide
from agon_cli.attention import PACKED
from agon_cli.engines import lean
from agon_cli.engines.sampling import draw
from agon_cli.errors import UsageError
from agon_cli.forward import cache_name, head
from agon_cli.policy import Policy, Seat, lora_config, with_adapter
from agon_cli.recipe.schema import Lora, Model
from agon_cli.types import Sampling

NF4_BLOCK = 64
"""Weights that share one float32 scale, as bitsandbytes stores nf4."""
PLAYER = "X"


@dataclass(frozen=True)
class Traced:
    """Bytes alive at the moment when most were, by kind, weights and gradients of adapters aside; `calls` is how many
    operations ran."""

    logits: int = 0
    scores: int = 0
    other: int = 0
    calls: int = 0

    @property
    def peak(self) -> int:
        """All kinds together."""
        return self.logits + self.scores + self.other


class Living(TorchDispatchMode):
    """Counts the bytes of every tensor made within it while it lives. Storages in `known` are not counted."""

    def __init__(self, known: set[int], vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary, self.width = vocabulary, width
        self.sizes: dict[int, tuple[str, int]] = dict.fromkeys(known, ("known", 0))
        self.alive = {"logits": 0, "scores": 0, "other": 0, "known": 0}
        self.most = Traced()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._take(tensor)
        if sum(self.alive.values()) > self.most.peak:
            self.most = Traced(self.alive["logits"], self.alive["scores"], self.alive["other"])
        return out

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        kind = "other"
        if tensor.shape[-1:] == (self.vocabulary,):
            kind = "logits"
        elif tensor.ndim >= 3 and tensor.shape[-2:] == (self.width, self.width):
            kind = "scores"
        self.sizes[key] = (kind, storage.nbytes())
        self.alive[kind] += storage.nbytes()
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        kind, size = self.sizes.pop(key, ("known", 0))
        self.alive[kind] -= size


class Outline:
    """One base with one adapter, sized. Raises UnreachableError where its configuration cannot be read, and UsageError
    where transformers knows no causal language model of that kind or it cannot be traced. `on_gpu`: computed as a GPU
    does, whatever this machine has."""

    def __init__(self, model: Model, shape: Lora, on_gpu: bool = False) -> None:
        self.model = model
        self.on_gpu = on_gpu
        config = models.config(model)
        self.text: Any = config.get_text_config()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with self._refusing("is no causal language model that transformers knows"):
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(
                    config, dtype=models.DTYPES[model.dtype], attn_implementation=PACKED, trust_remote_code=False
                )
            base.requires_grad_(False)
            base.eval()
        adapted = with_adapter(base, lora_config(shape, model), f"player_{PLAYER}")
        lora.take_over(adapted)
        norms.take_over(adapted)
        self._give_device(adapted)
        self.policy = Policy.of({PLAYER: Seat(adapted, f"player_{PLAYER}", None, (0,), model.id)})
        self.base = base
        self.vocabulary = int(base.get_output_embeddings().weight.shape[0])

    @property
    def adapter(self) -> int:
        """Parameters of one player's adapter."""
        return sum(parameter.numel() for parameter in self.policy.parameters(PLAYER).values())

    @property
    def parameters(self) -> int:
        """Parameters of the base; tied ones count once."""
        return sum(parameter.numel() for _, parameter in self._weights())

    @property
    def weights(self) -> int:
        """Bytes of the base as it is kept: 4-bit layers with their scales, everything else in the recipe's type."""
        packed = self._packed()
        return sum(
            parameter.numel() // 2 + 4 * -(-parameter.numel() // NF4_BLOCK) if id(parameter) in packed
            else parameter.nbytes for _, parameter in self._weights()
        )  # fmt: skip

    @property
    def largest_packed(self) -> int:
        """Weights of the largest 4-bit layer, which is unpacked whenever it is used; 0 where there is none."""
        packed = self._packed()
        return max((p.numel() for _, p in self._weights() if id(p) in packed), default=0)

    def copied(self, completion: int) -> int:
        """Bytes of the copies of weights that sampling completions of this length with transformers makes meanwhile."""
        return 0 if self.on_gpu or self.model.quantization else 4 * lean.copied(self.base, completion)

    @property
    def linear(self) -> int:
        """Weights that every token is multiplied with in the layers, the head aside; the adapter's are among them."""
        output = self.base.get_output_embeddings()
        return sum(m.weight.numel() for m in self.base.modules() if isinstance(m, nn.Linear) and m is not output)

    @property
    def head(self) -> int:
        """Weights of the head, which only completion tokens are multiplied with."""
        return int(self.base.get_output_embeddings().weight.numel())

    @property
    def adapts_head(self) -> bool:
        """Whether an adapter sits on the head."""
        return hasattr(self.base.get_output_embeddings(), "base_layer")

    @property
    def attention_width(self) -> int:
        """Query heads x head width over all layers that attend to every token before them; 0 where that is unknown."""
        text = self.text
        heads = getattr(text, "num_attention_heads", None) or 0
        wide = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        return int(heads * wide * sum(kind == "full_attention" for kind in kinds))

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.base.named_parameters() if ".player_" not in name)

    def _packed(self) -> set[int]:
        if self.model.quantization is None:
            return set()
        output = self.base.get_output_embeddings()
        adapters = {id(p) for p in self.policy.parameters(PLAYER).values()}
        linear = {id(m.weight) for m in self.base.modules() if isinstance(m, nn.Linear) and m is not output}
        return linear - adapters - {id(output.weight)}

    def _give_device(self, adapted: nn.Module) -> None:
        """Tensors of no device at all are given the one that this machine would use, so that operations choose the
        kernels they would choose there."""

        def on_device(tensor: Tensor) -> Tensor:
            return FakeTensor(self._mode, tensor.detach(), self._device)

        made: dict[int, nn.Parameter] = {}
        for module in adapted.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    own = made.setdefault(id(parameter), nn.Parameter(on_device(parameter), parameter.requires_grad))
                    module._parameters[name] = own
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = on_device(buffer)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except UsageError:
            raise
        except Exception as error:  # whatever an unusual architecture makes the libraries raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{self.model.id} {what}: {first}",
                "check its config.json: a causal language model, no size 0; where it is right, a real step measures "
                "what this cannot: agon plan RECIPE --probe",
            ) from error

    @contextmanager
    def _living(self, width: int) -> Iterator[Living]:
        known = {t.untyped_storage()._cdata for t in (*self.base.parameters(), *self.base.buffers())}
        for parameter in self.policy.parameters(PLAYER).values():
            known |= {parameter.grad.untyped_storage()._cdata} if parameter.grad is not None else set()
        living = Living(known, self.vocabulary, width)
        refusing, processor = self._refusing("cannot be traced without its weights"), wide.left_out(self.on_gpu)
        with refusing, processor, _nothing_packed(), self._mode, living:
            yield living

    @lru_cache(maxsize=64)  # noqa: B019  (an outline lives as long as the command)
    def update(self, rows: int, prompt: int, completion: int, checkpointing: bool) -> Traced:
        """One micro-batch of these sizes, forward and backward; adapters' gradients are there beforehand."""
        # Prompts that differ: nothing of them can be shared.
        pairs = [((row,) * prompt, (0,) * completion) for row in range(rows)]
        with self._mode:
            for parameter in self.policy.parameters(PLAYER).values():
                parameter.requires_grad_(True)
                parameter.grad = torch.zeros_like(parameter)
        with self._living(prompt + completion) as living:
            self.policy.logprobs(PLAYER, pairs, 1.0, recompute=checkpointing).sum().backward()
        return Traced(living.most.logits, living.most.scores, living.most.other, living.calls)

    @lru_cache(maxsize=64)  # noqa: B019
    def prefill(self, rows: int, tokens: int) -> tuple[Traced, int]:
        """Prompts read at once, and the bytes of the cache they leave."""
        with self._living(tokens) as living, torch.no_grad(), self.policy.acting(PLAYER) as seat, lora.held(seat.model):
            ids_PT = torch.zeros(rows, tokens, dtype=torch.long, device=self._device)
            out = self.base.get_decoder()(input_ids=ids_PT, use_cache=True)
            cache = out[cache_name(out)]
            head(self.base, out.last_hidden_state[:, -1])
            held = {
                tensor.untyped_storage()._cdata: tensor.nbytes  # a window is cut out of more, once, as it is repeated
                for layer in cache.layers
                for tensor in tree_leaves(list(vars(layer).values()))
                if isinstance(tensor, Tensor)
            }
        return Traced(living.most.logits, living.most.scores, living.most.other, living.calls), sum(held.values())

    @lru_cache(maxsize=64)  # noqa: B019
    def drawing(self, rows: int) -> Traced:
        """One token drawn for each of these rows, from their logits on."""
        with self._living(0) as living, torch.no_grad():
            logits_BV = torch.zeros(rows, self.vocabulary, dtype=models.DTYPES[self.model.dtype], device=self._device)
            draw(logits_BV, torch.zeros(rows, device=self._device), Sampling(1.0, 1.0, 0, 1))
        return Traced(living.most.logits, living.most.scores, living.most.other, living.calls)


@contextmanager
def _nothing_packed() -> Iterator[None]:
    """transformers looks at position ids to see whether several sequences share a row. Where there are only shapes it
    cannot, and makes masks that no run has."""
    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks
