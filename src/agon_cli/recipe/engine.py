"""What samples the completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agon_cli.recipe.section import Section


class HF(Section):
    """The training model itself, through transformers: nothing to install or start, and no second copy of the weights,
    but that of a small model on a CPU while it samples."""

    type: Literal["hf"]
    batch_tokens: int = Field(65536, ge=1)
    """Rows x longest row (prompt + completion) that are sampled at once; bounds the cache."""


class VLLM(Section):
    """vLLM in processes of its own on this machine, beside the training model; needs the `vllm` extra."""

    type: Literal["vllm"]
    memory: float = Field(0.5, gt=0, lt=1)
    """Share of the GPU's memory that vLLM may take while it samples; most of it is given back during updates."""


class Server(Section):
    """Running vLLM servers, started with runtime adapter loading and able to read the folder that adapters lie in."""

    type: Literal["server"]
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/@]+(/|$)")]] = Field(min_length=1)
    """Addresses such as http://127.0.0.1:8000; prompts are shared out among them."""
    timeout: float = Field(600.0, gt=0, le=604800)
    """Seconds that one answer may take, or a server be away, before the run stops, its state saved."""


Engine = Annotated[HF | VLLM | Server, Field(discriminator="type")]
