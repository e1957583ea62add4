"""Structured pruning: whole channels go, and the model is really smaller.

torch-pruning finds which layers share a channel (Fang et al. 2023) and takes it out of all of them;
the least important by their norms go first. Each group of layers is tried by itself on a copy, and
accepted only if what is left computes what the model does when those channels are not read: so a
group that torch-pruning misunderstands (heads, sums over channels, an output) stays as it was.

The result has other shapes than the recipe's model, and is written as a program of torch.export.
Cost: two copies of the model, and a traced forward for each layer.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import UsageError, require
from shoal.slim.figures import first_piece
from shoal.training.run import Run, call_model

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NUM_SAMPLES = 4  # that a change is judged by
_TOLERANCE = 1e-3  # of the largest output; narrower matrices are summed in another order


class _Removal(NamedTuple):
    """A copy of the model without some channels, and what tells whether it is right."""

    model: nn.Module
    narrowed: set[str]  # layers that give fewer channels
    read_by: dict[str, list[int]]  # the channels that layers no longer read


def remove_channels(run: Run, model: nn.Module, share: float) -> nn.Module:
    """A smaller copy of a model: of each group of layers that allows it, this share of channels."""
    pruning = require("torch_pruning", extra="slim")
    inputs = first_piece(run, _NUM_SAMPLES).inputs
    smaller, narrowed, why = copy.deepcopy(model).eval(), set[str](), ""
    names = [name for name, module in model.named_modules() if isinstance(module, _LAYERS)]
    for name in names:
        if name in narrowed:
            continue
        try:
            removal = _without_channels(pruning, smaller, name, share, inputs)
        except Exception as error:  # noqa: BLE001 (of many kinds: it cannot follow this layer)
            removal, why = None, f" torch-pruning cannot follow {name or 'it'}: {error}."
        if (
            removal is not None
            and not removal.narrowed & narrowed
            and _is_right(smaller, removal, inputs)
        ):
            smaller, narrowed = removal.model, narrowed | removal.narrowed
    if not narrowed:
        raise UsageError(
            f"No layer of the model, a {type(model).__name__}, can give up channels without "
            "another result: it has no linear or convolutional layer whose channels only other "
            f"such layers read.{why} Prune it with --how magnitude."
        )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, p in smaller.named_parameters():
        p.requires_grad_(name in trained)
    return smaller


def layers_of_one_width(one: nn.Module, other: nn.Module) -> list[str]:
    """The layers that give as many channels in both models."""
    layers = [(name, module) for name, module in one.named_modules() if isinstance(module, _LAYERS)]
    return [n for n, layer in layers if len(layer.weight) == len(weight_of(other.get_submodule(n)))]


def weight_of(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def _without_channels(
    pruning: Any, model: nn.Module, name: str, share: float, inputs: Any
) -> _Removal | None:
    """A copy without the least important channels of a layer and all that share them."""
    tried = copy.deepcopy(model)
    for p in tried.parameters():
        p.requires_grad_(True)  # the graph is found by its gradients
    layer = tried.get_submodule(name)
    with torch.enable_grad():
        graph = pruning.DependencyGraph().build_dependency(
            tried,
            inputs,
            forward_fn=call_model,
            output_transform=lambda output: pytree.tree_leaves(output),
            verbose=False,
        )
    take_out = graph.get_pruner_of_module(layer).prune_out_channels
    every = list(range(graph.get_out_channels(layer)))
    group = graph.get_pruning_group(layer, take_out, every)
    importance = pruning.importance.GroupMagnitudeImportance(p=2)(group)
    if importance is None or not 0 < (count := int(share * len(importance))) < len(every):
        return None
    least = sorted(importance.argsort()[:count].tolist())
    group = graph.get_pruning_group(layer, take_out, least)
    if not graph.check_pruning_group(group):
        return None
    removal = _described(graph, group, tried)
    group.prune()
    return removal


def _described(graph: Any, group: Any, model: nn.Module) -> _Removal | None:
    """What a group of torch-pruning takes out of each layer, by the layers' names."""
    names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
    narrowed, read_by = set[str](), dict[str, list[int]]()
    for step, indices in group:
        module = step.target.module
        if id(module) not in names:
            continue  # an operation without weights
        if graph.is_out_channel_pruning_fn(step.handler):
            narrowed.add(names[id(module)])
        elif isinstance(module, _LAYERS) and getattr(module, "groups", 1) == 1:
            read_by.setdefault(names[id(module)], []).extend(map(int, indices))
        else:
            return None  # it is not known how it reads them
    return _Removal(model, narrowed, read_by)


@torch.no_grad()
def _is_right(before: nn.Module, removal: _Removal, inputs: Any) -> bool:
    """Whether the copy computes what the model does when those channels are not read."""
    unread = copy.deepcopy(before)
    for name, channels in removal.read_by.items():
        weight_of(unread.get_submodule(name))[:, channels] = 0
    try:
        found = _tensors(call_model(removal.model, inputs))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # shapes do not fit any more
    wanted = _tensors(call_model(unread, inputs))
    return len(found) == len(wanted) and all(map(_alike, wanted, found))


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(one.abs().amax()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=_TOLERANCE * scale)
