"""A base laid over all ranks: each holds a part of every layer and borrows the rest for as long as that layer computes.

FSDP2 on the decoder's layers. What is trained is small and stays whole on every rank, as do embeddings, final norm and
head. In return every rank must take part in every pass of every other: passes are counted alike (`update`), and none
may sample with a base that the others are not using at that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agon_cli import environment
from agon_cli.errors import UsageError

if TYPE_CHECKING:  # what is refused is refused before anything heavy is loaded
    from agon_cli.policy import Policy
    from agon_cli.ranks import Ranks
    from agon_cli.recipe.schema import Recipe


def check(recipe: Recipe, gpus: int) -> None:
    """Raises UsageError where a recipe's bases cannot be laid over `gpus` processes, or those that a launcher
    started."""
    if gpus == 1 and environment.processes() == 1:
        raise UsageError("--shard lays a base over several processes, and this is one", "add --gpus N")
    if recipe.engine.type != "server":
        raise UsageError(
            f"--shard leaves no rank a whole base to sample from, and engine.type is {recipe.engine.type}",
            "sample with servers of their own: engine.type=server 'engine.urls=[http://127.0.0.1:8000]'",
        )
    if any(recipe.model_of(name).quantization == "nf4" for name in recipe.cast):
        raise UsageError(
            "--shard cannot cut the packed weights of model.quantization nf4",
            "leave --shard out (nf4 takes a quarter of the memory), or set model.quantization=null",
        )


def shard(policy: Policy, ranks: Ranks) -> None:
    """Lay the bases of a policy, loaded whole on the CPU, over the ranks' devices, one layer at a time. All ranks must
    call this, and from then on compute their passes together.

    Raises UsageError for a base without layers to cut.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    policy.known_hashes = policy.base_hashes()
    mesh = init_device_mesh(ranks.device, (ranks.size,))
    for model in {id(seat.model): seat.model for seat in policy.seats.values()}.values():
        decoder = model.get_base_model().get_decoder()
        layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise UsageError(f"--shard finds no layers in {type(decoder).__name__}", "leave --shard out")
        adapters = {parameter for name, parameter in model.named_parameters() if ".player_" in name}
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
        # The decoder holds nothing of its own to cut: tied embeddings are its and the head's, which is called alone.
        fully_shard(decoder, mesh=mesh, ignored_params=set(model.parameters()))
        model.to(ranks.device)
    policy.sharded_over = ranks
