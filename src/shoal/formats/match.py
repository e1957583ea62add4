"""Match the tensors of a source with those of a model, by name.

One rule for everything that puts weights into a model: names and shapes agree, and a floating-point
tensor does not become an integer one. Names may differ by one prefix (`prefix.py`). A tensor that
the model has under several names may come under any of them; non-persistent buffers may be there or
not.
"""

from typing import NamedTuple

import torch
from torch import nn

from shoal.checkpoint.dtypes import canonical_names
from shoal.formats.prefix import AS_THEY_ARE, PrefixRule, find_prefix
from shoal.formats.weights import ModelWeights
from shoal.formatting import first_names

_NAMED = 5


class TensorMatch(NamedTuple):
    """Which tensors match, and which do not."""

    source_names: dict[str, str]  # name in the model -> name in the source
    missing: list[str]  # in the source
    unexpected: list[str]  # not in the model
    wrong_shape: list[str]
    wrong_dtype: list[str]  # integer, floating or complex in one and not in the other
    rule: PrefixRule = AS_THEY_ARE  # by which names of the source are those of the model

    def problems(self) -> str:
        """What does not match, as text; empty if everything does."""
        problems = (
            ("not in it", self.missing),
            ("not in the model", self.unexpected),
            ("of another shape", self.wrong_shape),
            ("of another kind of numbers", self.wrong_dtype),
        )
        told = [f"{what}: {first_names(names, _NAMED)}" for what, names in problems if names]
        return "; ".join([*filter(None, [str(self.rule)]), *told]) if told else ""


def match_tensors(source: ModelWeights, model: nn.Module) -> TensorMatch:
    """Compare names, shapes and dtypes; reads no bytes."""
    first, own = canonical_names(model), model.state_dict()
    rule = find_prefix(
        {name: source.shape(name) for name in source.names},
        {name: tuple(own[name].shape) for name in first},
    )
    names = {name: rule.rename(name, own) for name in source.names}
    source_names: dict[str, str] = {}
    wrong_shape, wrong_dtype = [], []
    for name, known_as in names.items():
        if known_as not in first:
            continue
        if source.shape(name) != tuple(own[known_as].shape):
            wrong_shape.append(name)
        elif _kind(source.dtype(name)) != _kind(own[known_as].dtype):
            wrong_dtype.append(name)
        else:
            source_names.setdefault(first[known_as], name)
    wrong = {first[names[name]] for name in (*wrong_shape, *wrong_dtype)}
    missing = sorted(set(first.values()) - source_names.keys() - wrong)
    known = first.keys() | non_persistent_buffers(model)
    unexpected = sorted(name for name in names if names[name] not in known)
    return TensorMatch(source_names, missing, unexpected, wrong_shape, wrong_dtype, rule)


def non_persistent_buffers(model: nn.Module) -> set[str]:
    """The buffers that are not in the model's state dict."""
    return {name for name, _ in model.named_buffers()} - model.state_dict().keys()


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
