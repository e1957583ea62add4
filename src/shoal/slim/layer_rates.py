"""Parameters by name patterns, and a factor of the learning rate for each of them. Pure.

A pattern is what a shell takes for file names: `*` is any text, dots too. It names parameters, or a
module, which stands for all parameters in it: `embeddings` is `embeddings.*`. Layers are found by
the numbers in names: `encoder.layer.3.output.weight` is in the layer `encoder.layer.3`. What stands
before the first of them is the lowest, what comes after the last the highest.

Read next: `adapting.py`, which freezes by patterns, and `scale_rates` in `numerics/optimizers.py`,
which gives parameters of one factor a group of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from shoal.errors import UsageError, nearest
from shoal.formatting import first_names

_SHOWN = 8  # names, of a model that has many


def names_matching(pattern: str, names: Iterable[str], option: str) -> set[str]:
    """The names that a pattern means; refused if there are none, for then it is misspelt."""
    known = list(names)
    found = {
        name for name in known if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    }
    if not found:
        raise UsageError(f"{option}: {pattern!r} matches no parameter. {_nearest(pattern, known)}")
    return found


def layer_depths(names: Sequence[str]) -> dict[str, int]:
    """How high in the model each parameter stands, counted in numbered layers from the bottom.

    `names` are in the model's order. A name without a number belongs to the layer before it, if
    another one follows; else it is above all of them, or below.
    """
    layers = {name: _layer_of(name) for name in names}
    numbered = [at for at, name in enumerate(names) if layers[name]]
    depths: dict[str, int] = {}
    met: dict[str, int] = {}  # layers, by their depths
    for at, name in enumerate(names):
        if layer := layers[name]:
            depths[name] = met.setdefault(layer, len(met) + 1)
        else:
            is_above = bool(numbered) and at > numbered[-1]
            depths[name] = len(met) + is_above
    return depths


def rate_factors(
    names: Sequence[str], rates: Mapping[str, float], layer_decay: float | None
) -> dict[str, float]:
    """The factor of each parameter: of the last pattern that matches it, times that of its layer.

    The highest layer has the factor 1, the next `layer_decay`, the next its square.
    """
    factors = dict.fromkeys(names, 1.0)
    for pattern, factor in rates.items():
        factors |= dict.fromkeys(names_matching(pattern, names, "rates"), float(factor))
    if layer_decay is None:
        return factors
    depths = layer_depths(names)
    top = max(depths.values(), default=0)
    if not any(map(_layer_of, names)):
        raise UsageError(
            f"layer_decay={layer_decay:g}: the model has no numbered layers, as in "
            "layers.0.weight. Name its layers in rates={...} instead. Its parameters: "
            f"{first_names(names, _SHOWN)}."
        )
    return {name: factor * layer_decay ** (top - depths[name]) for name, factor in factors.items()}


def check_rates(rates: Mapping[str, float], layer_decay: float | None) -> None:
    """Refuse what is no factor."""
    for pattern, factor in rates.items():
        if not _is_number(factor) or not 0 < factor < float("inf"):
            raise UsageError(
                f"rates: {factor!r} for {pattern!r} is no factor of a learning rate, which is "
                "above 0. To train none of it, freeze it."
            )
    if layer_decay is not None and (not _is_number(layer_decay) or not 0 < layer_decay <= 1):
        raise UsageError(
            f"layer_decay={layer_decay!r} must be above 0 and at most 1: 0.9 lets each layer learn "
            "0.9 times as fast as the one above it."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _layer_of(name: str) -> str:
    """A name up to its first number; empty if it has none."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """What may have been meant: a module or a parameter."""
    parts = [name.split(".") for name in names]
    modules = {".".join(found[:end]) for found in parts for end in range(1, len(found) + 1)}
    told = nearest(pattern.removesuffix("*").removesuffix("."), modules)
    return told if told.startswith("Did") else f"Parameters: {first_names(names, _SHOWN)}."
