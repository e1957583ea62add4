"""Tensor parallelism for any module: find what can be cut, and cut it.

Each rank holds a part of every large matrix and computes with it; two matrices in a row cost one
message, in forward and in backward. `find_cuts` finds the pairs by running the model, `cut_tensors`
replaces parameters by their local parts, and `TensorForward` (in `forward.py`) runs the
result. Parameters stay plain tensors with their names, only smaller.

Order of calls: `find_cuts` anywhere, also before ranks exist; `cut_tensors` on every rank of the
axis with its own number; then a `TensorForward` around each forward. Cost per step: for each pair
two all-reduces of an activation. Not for slow links, and not where one rank holds the model and the
batch can be shared. Megatron-LM, arXiv 1909.08053. Read next: `part.py`, `find.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.errors import PlanError, nearest
from shoal.parallel.layout import Cut, part_of
from shoal.parallel.tensor.find import ProbeRegion, preserve_model, search
from shoal.parallel.tensor.forward import TensorForward
from shoal.parallel.tensor.part import RECORDS, TAG, CutRecord
from shoal.parallel.tensor.search_state import Choice, SearchState, kinds_of

__all__ = [
    "ParameterCut",
    "TensorForward",
    "TensorPlan",
    "cut_tensors",
    "find_cuts",
    "mark_cut_parameters",
]

_HOWS = ("whole", "column", "row")
_STYLES = {"colwise": "column", "rowwise": "row"}  # of Hugging Face's plans


class ParameterCut(NamedTuple):
    """A parameter in the table that is shown."""

    name: str
    shape: tuple[int, ...]
    how: str
    why: str


@dataclass(frozen=True)
class TensorPlan:
    """Which parameters and buffers are cut, and why others are not."""

    cuts: dict[str, Cut]
    whole: dict[str, str]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    hows: dict[str, str] = field(default_factory=dict)
    crossed: frozenset[str] = frozenset()  # modules that are given, or return, a cut value

    def table(self) -> list[ParameterCut]:
        """A row for each parameter that is cut or could have been, in the model's order."""
        rows = []
        for name, shape in self.shapes.items():
            if name in self.cuts:
                packs = self.cuts[name].packs
                packed = f" in {packs} packs" if packs > 1 else ""
                rows.append(
                    ParameterCut(name, shape, f"dim {self.cuts[name].dim}{packed}", self.hows[name])
                )
            elif name in self.whole:
                rows.append(ParameterCut(name, shape, "whole", self.whole[name]))
        return rows

    def share(self, model: nn.Module) -> float:
        """The fraction of a model's parameter elements that are cut, before or after cutting."""
        counts = {name: _num_elements(p) for name, p in model.named_parameters()}
        return sum(counts[name] for name in self.cuts if name in counts) / sum(counts.values())


def find_cuts(
    model: nn.Module,
    forwards: Sequence[Callable[[], Any]],
    num_ranks: int,
    overrides: Mapping[str, str] = {},
) -> TensorPlan:
    """What of a model can be cut over so many ranks. Each of `forwards` runs the model once.

    The model is left as it was. Every rank that calls this finds the same. `overrides` maps
    patterns of module names to "whole", "column" or "row"; a model's own plan (`_tp_plan`) is
    followed where it works.
    """
    with preserve_model(model):
        for forward in forwards:
            forward()  # what fails here fails without a plan too
    choices = _choices(model, overrides)
    for cuts_small in (False, True):  # what is small is cut only if there is nothing else
        state = SearchState(model, num_ranks, choices, cuts_small)
        region = search(model, forwards, state)
        if region.cuts:
            break
    _refuse_odd_heads(region, state)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    cuts = _with_siblings(region, state.whole, shapes)
    shapes |= {name: tuple(b.shape) for name, b in model.named_buffers() if name in cuts}
    whole = {
        name: _reason(name, state, region)
        for name, shape in shapes.items()
        if name not in cuts and len(shape) >= 2
    }
    plan = TensorPlan(
        {name: cuts[name] for name in shapes if name in cuts},
        whole,
        shapes,
        {name: region.hows.get(name, "like its siblings") for name in cuts},
        frozenset(name for name, module in model.named_modules() if module in region.open),
    )
    if not any(len(shapes[name]) >= 2 for name in cuts):
        raise _nothing_to_cut(plan, num_ranks)
    for name, choice in choices.items():
        if choice.is_firm and choice.how != "whole" and name not in cuts:
            state.keep_whole(name, whole[name])
    return plan


def cut_tensors(model: nn.Module, plan: TensorPlan, rank: int, num_ranks: int) -> None:
    """Replace every parameter and buffer of the plan by a copy of this rank's part, in place."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    made: dict[int, Tensor] = {}
    held: dict[int, CutRecord] = {}
    for name, cut in plan.cuts.items():
        whole = named[name]
        part = part_of(whole, cut, rank, num_ranks)
        if isinstance(whole, nn.Parameter):
            part = nn.Parameter(part, requires_grad=whole.requires_grad)
        made[id(whole)], held[id(whole)] = part, CutRecord(cut, tuple(whole.shape))
    for module in model.modules():
        records: dict[str, CutRecord] = {}
        owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for owned in owners:
            for name, value in owned.items():
                if value is not None and id(value) in made:
                    records[name] = held[id(value)]
                    owned[name] = made[id(value)]
        if records:
            setattr(module, RECORDS, records)
    mark_cut_parameters(model)


def mark_cut_parameters(module: nn.Module) -> None:
    """Mark the parameters and buffers that a module and those below it own now as cut.

    To be called whenever other objects took their place, by FSDP for instance.
    """
    for owner in module.modules():
        for name, held in getattr(owner, RECORDS, {}).items():
            is_parameter = name in owner._parameters
            value = (owner._parameters if is_parameter else owner._buffers)[name]
            if type(value) in (nn.Parameter, Tensor):  # not what FSDP keeps between forwards
                setattr(value, TAG, held)


def _num_elements(parameter: Tensor) -> int:
    held: CutRecord | None = getattr(parameter, TAG, None)
    if held is None:
        return parameter.numel()
    count = 1
    for size in held.shape:
        count *= size
    return count


def _choices(model: nn.Module, overrides: Mapping[str, str]) -> dict[str, Choice]:
    """What is forced for each matrix: by the model's own plan, and before that by the user."""
    found: dict[str, Choice] = {}
    for prefix, module in model.named_modules():
        own = getattr(module, "_tp_plan", None)
        for pattern, style in (own if isinstance(own, Mapping) else {}).items():
            full = f"{prefix}.{pattern}" if prefix else pattern
            if style in _STYLES:
                for name in _matrices(model, full):
                    found[name] = Choice(_STYLES[style], "the model's own plan", False)
    for pattern, how in overrides.items():
        if how not in _HOWS:
            raise PlanError(f"override {pattern}={how} is not known. {nearest(how, _HOWS)}")
        names = _matrices(model, pattern)
        if not names:
            modules = [name for name, _ in model.named_modules() if name]
            near = nearest(pattern, modules)
            raise PlanError(f"override {pattern}={how} names no module with a matrix. {near}")
        for name in names:
            found[name] = Choice(how, f"override {pattern}={how}", True)
    return found


def _matrices(model: nn.Module, pattern: str) -> list[str]:
    """The names of the matrices in the modules that a pattern names."""
    known = {id(p): name for name, p in model.named_parameters()}
    found = []
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern):
            found += [known[id(p)] for p in module.parameters() if p.ndim >= 2]
    return found


def _with_siblings(
    region: ProbeRegion, whole: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Cut]:
    """Cut what the examples did not use (an expert that was not chosen) as its siblings are."""
    families: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        for kind in kinds_of(name):
            families.setdefault((kind, shape), []).append(name)
    cuts = dict(region.cuts)
    for name, shape in shapes.items():
        if name in region.seen or name in whole:
            continue
        for kind in kinds_of(name):
            known = {region.cuts.get(n) for n in families[kind, shape] if n in region.seen}
            if len(known) == 1 and None not in known:
                cuts[name] = next(cut for cut in known if cut is not None)
                break
    return cuts


def _reason(name: str, state: SearchState, region: ProbeRegion) -> str:
    choice = state.choices.get(name)
    if choice is not None and choice.how == "whole":
        return choice.source
    unused = "the example forward does not multiply by it"
    return state.whole.get(name) or region.notes.get(name, unused)


def _refuse_odd_heads(region: ProbeRegion, state: SearchState) -> None:
    """Attention is cut by heads; one that cannot be must be left whole on purpose."""
    for module, heads in region.odd_heads.items():
        prefix, num_ranks = state.modules[module], state.num_ranks
        inside = [n for n in state.names.values() if n.startswith(f"{prefix}.")]
        choices = [state.choices[n] for n in inside if n in state.choices]
        if any(choice.is_firm and choice.how == "whole" for choice in choices):
            continue
        fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise PlanError(
            f"tensor={num_ranks} does not divide {heads} heads, in {prefix or 'the model'}. The "
            f"tensor axis must divide the heads. Use {' or '.join(fits)}, or leave it whole with "
            f'cuts={{"{prefix}": "whole"}} in the Run.'
        )


def _nothing_to_cut(plan: TensorPlan, num_ranks: int) -> PlanError:
    reasons = list(dict.fromkeys(f"{name}: {why}" for name, why in plan.whole.items()))[:3]
    return PlanError(
        f"tensor={num_ranks} can cut nothing of this model ({'; '.join(reasons) or 'no matrix'}). "
        "A matrix is cut if the ranks divide it and what follows it works on parts. Use another "
        "number of ranks, or the data or pipeline axis."
    )
