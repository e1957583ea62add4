"""`quantize`: weights as whole numbers of 8 or 4 bits, through torchao.

- int8: weights of linear layers in 8 bits, a scale for each row.
- int4: in 4 bits, a scale for every 32 numbers of a row.
- dynamic-int8: weights in 8 bits, and activations as they come, a scale for each token.
- static-int8: the same with one scale for the activations of a layer, found beforehand: its inputs
  on up to 100 batches of the recipe's data reach as far.
- qat-int8: the recipe trains it once more with the rounding of dynamic-int8 in its forward, then
  the weights are rounded for good.

The others need no samples to choose scales: those of weights come from the weights, those of
activations from each batch. Other layers (convolutions, embeddings, weights that are tied, rows
of one number, or that groups of 32 do not divide) stay as they are, and are named. torchao's
kernels for 4 bits are those of accelerators: on a CPU int4 saves memory on a disk, and is computed
in full precision.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.api import recipe_of
from shoal.errors import UsageError, nearest, require
from shoal.formats.huggingface import SINGLE
from shoal.formats.new_output import new_directory, new_files
from shoal.formats.quantized import is_quantized, require_torchao, write_quantized
from shoal.slim.figures import (
    ModelTable,
    figures_of,
    layers_with_matrices,
    load_trained,
    notes_of,
    num_bytes_at,
)
from shoal.slim.results import Written, is_pretrained, new_place, write_program
from shoal.slim.retraining import (
    ChangedModel,
    Given,
    Training,
    train_changed,
    trained_model,
)
from shoal.slim.statistics import call_on_samples
from shoal.storage.files import follow_umask
from shoal.training.load import load, without_bars
from shoal.training.run import Run

FORMS = ("int8", "int4", "dynamic-int8", "static-int8", "qat-int8")
Scales = Mapping[str, Tensor]  # of the inputs of layers, by the layers' names
GROUP = 32  # numbers of a row that share a scale, of int4
_INPUTS = {"int4": f"with a multiple of {GROUP} inputs"}


class QuantizeTable(ModelTable, frozen=True, kw_only=True):
    """What `shoal quantize --json` prints, beside the exit code."""

    kept: list[str]  # layers that stayed as they were


def quantize(
    recipe: Given,
    begin_from: str | Path,
    *,
    to: str,
    out: str | Path,
    settings: Mapping[str, Any] | None = None,
    training: Training | None = None,
) -> QuantizeTable:
    """Quantise the model of a recipe with the weights of `begin_from`, and write it to `out`.

    A name that ends in .pt2 makes a program, .safetensors one file, any other a directory.
    """
    if to not in FORMS:
        raise UsageError(f"--to {to}: there is no such form. {nearest(to, FORMS)}")
    if training is not None and to != "qat-int8":
        raise UsageError(f"training has no effect with to={to!r}, which does not train.")
    place, settings = new_place(out), settings or {}
    require_torchao()
    if to == "qat-int8":
        change = partial(quantize_in_training, begin_from=str(begin_from))
        outcome = train_changed(recipe, settings, change, training or Training())
        model = unround(trained_model(outcome))
        run, _ = recipe_of(recipe, settings).load()
    else:
        run, _ = recipe_of(recipe, settings).load()
        model = load_trained(run, begin_from).model
    before = load_trained(run, begin_from)
    one = figures_of(run, before.model, before.num_bytes)
    scales = scales_of_inputs(run, model) if to == "static-int8" else None
    kept = layers_kept(model, to, scales)
    written = _write(run, model, to, place, scales)
    again = written.model
    if quantized := _quantized_in(again):  # transformers keeps more, a program has no layers
        kept = [name for name in layers_with_matrices(again) if name not in quantized]
    return QuantizeTable(
        before=one,
        after=figures_of(run, again, num_bytes_at(place)),
        out=str(place),
        kept=kept,
        notes=notes_of(run, before.note, written.note),
    )


def quantize_in_training(run: Run, begin_from: str | Path | None = None) -> Run:
    """The run with the rounding of dynamic-int8 in the forward of its linear layers.

    Weights keep their names and their precision; gradients pass the rounding as if it were not
    there. It begins with the weights of `begin_from`, if given.
    """
    require_torchao()
    return replace(run, model=ChangedModel(run, _add_rounding, "rounding", begin_from))


def quantize_model(model: nn.Module, to: str, scales: Scales | None = None) -> None:
    """Round the weights of a model for good, in place."""
    quantization = require_torchao()
    chosen = _quantizable(model, to, scales)
    if scales is None:
        quantization.quantize_(model, _config(to), filter_fn=lambda module, name: name in chosen)
        return
    for name in chosen:
        quantization.quantize_(model.get_submodule(name), _static(scales[name]))


@torch.no_grad()
def scales_of_inputs(run: Run, model: nn.Module) -> Scales:
    """The scale of the inputs of each linear layer, by the largest of them on the run's data.

    A layer is left out that was not called, or with inputs of unlike numbers of dims: torchao's
    scale is for one.
    """
    found: dict[str, list[Tensor]] = {}

    def listen(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hear(module: nn.Module, args: tuple[Any, ...]) -> None:
            found.setdefault(name, []).append(args[0].abs().amax().expand([1] * args[0].dim()))

        return hear

    layers = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(listen(name)) for name, layer in layers]
    try:
        call_on_samples(run, model.eval())
    finally:
        for hook in hooks:
            hook.remove()
    most = 63 if _is_narrow() else 127  # of the whole numbers that they become
    return {
        name: torch.stack(seen).amax(0).clamp(min=torch.finfo(torch.float32).eps) / most
        for name, seen in found.items()
        if len({one.dim() for one in seen}) == 1
    }


def layers_kept(model: nn.Module, to: str, scales: Scales | None = None) -> list[str]:
    """The layers of a model with matrices that are left as they are."""
    chosen = _quantizable(model, to, scales)
    return [name for name in layers_with_matrices(model) if name not in chosen]


def _quantized_in(model: nn.Module) -> set[str]:
    """The layers whose parameters are torchao's."""
    return {
        name
        for name, module in model.named_modules()
        if any(is_quantized(p) for p in module.parameters(recurse=False))
    }


def unround(model: nn.Module) -> nn.Module:
    """The model without rounding in its forward, its weights as they were trained."""
    qat = require_torchao("quantization.qat")
    quantization = require_torchao()
    rounds = qat.linear.FakeQuantizedLinear
    quantization.quantize_(
        model, qat.QATConfig(step="convert"), filter_fn=lambda module, name: type(module) is rounds
    )
    return model


def _quantizable(model: nn.Module, to: str, scales: Scales | None = None) -> set[str]:
    """The linear layers whose weight is theirs alone, and whose rows torchao can cut.

    A row of one number it takes for a whole: it finds one scale for all rows, which fits nothing.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen = set()
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or uses[id(module.weight)] != 1 or not name:
            continue
        if scales is not None and name not in scales:
            continue
        if module.in_features % GROUP == 0 if to == "int4" else module.in_features > 1:
            chosen.add(name)
    if not chosen:
        raise UsageError(
            f"The model, a {type(model).__name__}, has no layer that can be quantised to {to}: a "
            f"linear layer whose weight is its own, {_INPUTS.get(to, 'with more than one input')}."
        )
    return chosen


def _config(to: str) -> Any:
    """torchao's name of a form."""
    quantization = require_torchao()
    if to == "int8":
        return quantization.Int8WeightOnlyConfig()
    if to == "int4":
        group = quantization.PerGroup(GROUP)
        dtype: torch.dtype = vars(torch)["int4"]  # which torch's own types do not tell of
        return quantization.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=group)
    return quantization.Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=quantization.MappingType.ASYMMETRIC,  # which training can round to, too
        reduce_range=_is_narrow(),
    )


def _static(scale: Tensor) -> Any:
    quantization = require_torchao()
    return quantization.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=scale,
        granularity=[quantization.PerTensor(), quantization.PerRow()],
        reduce_range=_is_narrow(),
    )


def _is_narrow() -> bool:
    """Whether this is a CPU whose sums of products overflow, unless numbers are of 7 bits."""
    narrow: bool = require_torchao("utils").should_reduce_range(torch.device("cpu"))
    return narrow


def _add_rounding(model: nn.Module) -> nn.Module:
    """Let linear layers round weights and inputs in their forward, as dynamic-int8 does."""
    qat = require_torchao("quantization.qat")
    rounding = qat.QATConfig(
        activation_config=qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        weight_config=qat.IntxFakeQuantizeConfig(torch.int8, "per_channel"),
        step="prepare",
    )
    chosen = _quantizable(model, "qat-int8")
    quantization = require_torchao()
    quantization.quantize_(model, rounding, filter_fn=lambda module, name: name in chosen)
    for name in chosen:
        layer: Any = model.get_submodule(name)
        layer.needs_whole_weights = "its rounding looks at whole rows"
    return model


def _write(run: Run, model: nn.Module, to: str, place: Path, scales: Scales | None) -> Written:
    """Write a model, quantised."""
    why = ""
    if is_pretrained(model) and not place.suffix and scales is not None:
        why = "from_pretrained knows no scales of single layers; shoal.load and the recipe load it."
    elif is_pretrained(model) and not place.suffix:
        try:
            _write_pretrained(model, to, place)
            whole = " It stores 4 bits in a whole byte: pack it." if to == "int4" else ""
            note = f"from_pretrained loads it, with torchao installed.{whole}"
            return Written(load(place, run), note)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
            why = f"transformers cannot write it for from_pretrained: {error}"
    quantize_model(model, to, scales)
    if place.suffix == ".pt2":
        return write_program(run, model, place)
    if place.suffix == ".safetensors":
        with new_files(place) as partial:
            write_quantized(model, partial)
    else:
        with new_directory(place) as folder:
            write_quantized(model, folder / SINGLE)
    return Written(load(place, run), why)


def _write_pretrained(model: Any, to: str, place: Path) -> None:
    """Let transformers quantise and write it, since it must know how when it loads it."""
    transformers = require("transformers", extra="transformers")
    with new_directory(place) as folder, without_bars(transformers):
        plain = folder / "plain"
        model.save_pretrained(plain)
        again = type(model).from_pretrained(
            plain,
            quantization_config=transformers.TorchAoConfig(quant_type=_config(to)),
            local_files_only=True,
        )
        again.save_pretrained(folder)
        shutil.rmtree(plain)
        follow_umask(folder)
