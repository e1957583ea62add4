"""`adapt`: a Run that begins with trained weights and learns something new.

    shoal.slim.adapt(run, begin_from="runs/base-1", freeze=["embeddings"], layer_decay=0.9)

What changes is the model as it is made (weights, heads, what is frozen, adapters) and the groups of
the recipe's own optimizer. Every plan, checkpoint and verification sees an ordinary Run. Cost: the
weights are read whenever the model is made, once on each host; nothing in a step.

Read next: `layer_rates.py` for names and factors, `adapters.py` for LoRA.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import BadCheckpoint, UsageError, nearest
from shoal.formats.match import match_tensors
from shoal.formats.open_weights import open_weights
from shoal.formats.weights import ModelWeights
from shoal.logs import warn_once
from shoal.numerics.optimizers import scale_rates
from shoal.slim.adapters import add_adapters, lora_in_words, read_lora
from shoal.slim.layer_rates import check_rates, names_matching, rate_factors
from shoal.training.run import Run

Heads = Mapping[str, Callable[[], nn.Module]]
_LORA = ".lora_A."  # in names of tensors of a model with adapters


def adapt(
    run: Run,
    *,
    begin_from: str | Path | None = None,
    freeze: Sequence[str] = (),
    rates: Mapping[str, float] | None = None,
    layer_decay: float | None = None,
    lora: Any = None,
    head: Heads | None = None,
) -> Run:
    """The run with a model that begins with the weights of `begin_from`, and is trained in part.

    `begin_from` is a checkpoint, a run directory, a file or a directory of Hugging Face; tensors
    that do not match the model are left out, and named. `freeze` are name patterns of what is not
    trained. `rates` are factors of the learning rate by name patterns, the last that matches holds;
    `layer_decay` gives each numbered layer this factor of the one above it. `lora`, a
    `peft.LoraConfig` or a mapping with r, alpha, targets and dropout, trains adapters alone. `head`
    are new modules by the names of those that they replace.
    """
    change = _Change(
        begin_from=begin_from,
        freeze=_patterns(freeze),
        rates=dict(rates or {}),
        layer_decay=layer_decay,
        lora=None if lora is None else read_lora(lora),
        head=dict(head or {}),
    )
    change.check()
    model = AdaptedModel(run, change)
    if not change.rates and layer_decay is None:
        return replace(run, model=model)
    return replace(run, model=model, optimizer=AdaptedOptimizer(run, model))


@dataclass(frozen=True)
class _Change:
    """What becomes of a model."""

    begin_from: str | Path | None
    freeze: Sequence[str]
    rates: Mapping[str, float]
    layer_decay: float | None
    lora: Any
    head: Heads

    def check(self) -> None:
        check_rates(self.rates, self.layer_decay)
        if self.lora is not None and self.freeze:
            raise UsageError(
                "freeze has no effect with lora, which trains adapters, and new heads, alone. "
                "Leave one of them out."
            )
        for name, make in self.head.items():
            if isinstance(make, nn.Module) or not callable(make):
                raise UsageError(
                    f"head: {name!r} is a {type(make).__name__}. Give a function that makes it, "
                    f"so that it begins with the run's seed: {{{name!r}: lambda: nn.Linear(8, 2)}}."
                )

    def in_words(self) -> str:
        """For records: a run that goes on must be adapted as it began."""
        parts = {
            "begin_from": str(self.begin_from or ""),
            "freeze": ",".join(self.freeze),
            "head": ",".join(self.head),
            "lora": "" if self.lora is None else lora_in_words(self.lora),
        }
        return " ".join(f"{name}={text}" for name, text in parts.items() if text)

    def rates_in_words(self) -> str:
        parts = [f"{pattern}={factor:g}" for pattern, factor in self.rates.items()]
        decay = [] if self.layer_decay is None else [f"layer_decay={self.layer_decay:g}"]
        return " ".join([*parts, *decay])


class AdaptedModel:
    """Makes the model of a run, and changes it."""

    def __init__(self, run: Run, change: _Change):
        self._make, self.change = run.model, change
        self.factors: dict[str, float] = {}  # of learning rates, once a model was made
        name = getattr(run.model, "__qualname__", type(run.model).__name__)
        self.__qualname__ = f"{name} with {change.in_words() or 'rates'}"  # which records keep

    def __call__(self) -> nn.Module:
        model, change = self._make(), self.change
        if not isinstance(model, nn.Module):
            return model  # which is refused where models are made
        _put_heads(model, change.head)
        if change.begin_from is not None:
            _begin(model, change.begin_from, tuple(change.head))
        _freeze(model, change.freeze)
        if change.lora is not None:
            add_adapters(model, change.lora, tuple(change.head))
        self.factors = _factors(model, change)
        return model


class AdaptedOptimizer:
    """Makes the optimizer of a run, with the factors that its model was made with.

    The optimizer is shown what is trained, and layers count whether they are or not: so factors
    come from the model, which every process has made before, or the one that it was forked from.
    """

    def __init__(self, run: Run, model: AdaptedModel):
        self._make, self._model = run.optimizer, model
        name = getattr(run.optimizer, "__qualname__", type(run.optimizer).__name__)
        self.__qualname__ = f"{name} with {model.change.rates_in_words()}"

    def __call__(self, named: Any) -> Optimizer:
        pairs = list(named)
        optimizer = self._make(pairs)
        if not isinstance(optimizer, Optimizer):
            return optimizer  # which is refused where optimizers are made
        factors = self._model.factors
        return scale_rates(optimizer, {p: factors.get(name, 1.0) for name, p in pairs})


def _patterns(given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"freeze is a list of name patterns. Write freeze=[{given!r}].")
    return tuple(given)


def _put_heads(model: nn.Module, heads: Heads) -> None:
    for name, make in heads.items():
        known = {path: module for path, module in model.named_modules() if path}
        if name not in known:
            raise UsageError(
                f"head: {type(model).__name__} has no module {name!r}. {nearest(name, known)}"
            )
        made = make()
        if not isinstance(made, nn.Module):
            raise UsageError(f"head: {name!r} made a {type(made).__name__}, not an nn.Module.")
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)


def _begin(model: nn.Module, where: str | Path, heads: Sequence[str]) -> None:
    """Copy the weights that match; new heads stay new. What was left out is said."""
    opened = open_weights(where)
    try:
        weights = ModelWeights(opened.weights)
    except BadCheckpoint as bad:
        raise BadCheckpoint(f"{opened.place}: {bad}") from bad
    found = match_tensors(weights, model)
    taken = {
        name: source for name, source in found.source_names.items() if not _is_below(name, heads)
    }
    if any(_LORA in name for name in found.unexpected):
        raise UsageError(
            f"{opened.place} is of a model with LoRA adapters, which are no part of this one. "
            "Merge them first: shoal checkpoint export ... --merge."
        )
    if not taken:
        raise UsageError(f"{opened.place} and the model have no tensor in common.")
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, source in taken.items():
        weights.fill(source, own[name].detach())
    left = found._replace(
        missing=[name for name in found.missing if not _is_below(name, heads)],
        wrong_shape=[name for name in found.wrong_shape if not _is_below(name, heads)],
    )
    if told := left.problems():
        warn_once(
            f"{opened.place}: what does not match the model was left out ({told}).", on_screen=True
        )


def _is_below(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    named = dict(model.named_parameters())
    for pattern in patterns:
        for name in names_matching(pattern, named, "freeze"):
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise UsageError(f"freeze={list(patterns)} leaves nothing to train. Leave some of it out.")


def _factors(model: nn.Module, change: _Change) -> dict[str, float]:
    """The factors of learning rates, by the names of all parameters."""
    if not change.rates and change.layer_decay is None:
        return {}
    named = dict(model.named_parameters())
    for pattern in change.rates:
        matching = names_matching(pattern, named, "rates")
        if not any(named[name].requires_grad for name in matching):
            raise UsageError(
                f"rates: {pattern!r} matches only parameters that are frozen, and has no effect. "
                "Leave it out."
            )
    return rate_factors(list(named), change.rates, change.layer_decay)
