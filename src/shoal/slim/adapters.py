"""LoRA adapters, through peft: put into a model, written as peft reads them, merged into weights.

An adapter is two small matrices beside a linear layer, whose product is added to its weight; they
are trained, and the layer is not (Hu et al. 2021). peft puts them into the model that the recipe
made, which stays what it is: its class, its forward, and the names of all other parameters. Layers
that are trained as a whole beside them, new heads say, are peft's `modules_to_save`.

Read next: `adapting.py`.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from shoal.errors import UsageError, nearest, require
from shoal.formats.new_output import new_directory
from shoal.formats.safetensors import write_file
from shoal.formats.weights import ModelWeights
from shoal.slim.results import as_weights

WEIGHTS = "adapter_model.safetensors"  # peft's name, beside its adapter_config.json
_ADAPTER = "default"  # peft's name of the only one
_PREFIX = "base_model.model."  # before each name in a file of peft's
_KEYS = {"r": "r", "alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}
_KEEPS_BASE = (True, False, "gaussian", "orthogonal")  # ways to begin that leave the base alone


def read_lora(given: Any) -> Any:
    """A peft.LoraConfig, from one or from a mapping with r, alpha, targets and dropout."""
    peft = require("peft", "adapt")
    if isinstance(given, Mapping):
        for key in given:
            if key not in _KEYS:
                raise UsageError(f"lora: there is no {key!r}. {nearest(str(key), _KEYS)}")
        try:
            given = peft.LoraConfig(**{_KEYS[key]: value for key, value in given.items()})
        except (ValueError, TypeError) as error:
            raise UsageError(f"lora: peft refuses it: {error}") from error
    if not isinstance(given, peft.LoraConfig):
        raise UsageError(
            f"lora is a {type(given).__name__}. Give a peft.LoraConfig, or a mapping such as "
            '{"r": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}.'
        )
    if given.init_lora_weights not in _KEEPS_BASE:
        raise UsageError(
            f"lora: init_lora_weights={given.init_lora_weights!r} changes the weights that the "
            "adapters are for, so they would not fit the model that they are loaded into. Use one "
            f"of {', '.join(map(repr, _KEEPS_BASE))}."
        )
    return given


def lora_in_words(config: Any) -> str:
    """The numbers of a configuration that make another model, for records."""
    targets = config.target_modules or "chosen by peft"
    named = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return f"r={config.r},alpha={config.lora_alpha:g},targets={named}"


def add_adapters(model: nn.Module, config: Any, trained: Sequence[str] = ()) -> None:
    """Put adapters into a model; they, and the modules named `trained`, are what is trained."""
    if has_adapters(model):
        raise UsageError("lora: the recipe's model has adapters of peft already. Leave lora out.")
    own = copy.deepcopy(config)  # peft writes into it
    own.modules_to_save = [*(own.modules_to_save or ()), *trained] or None
    peft = require("peft", "adapt")
    try:
        peft.inject_adapter_in_model(own, model, _ADAPTER)
    except (ValueError, TypeError, KeyError) as error:
        linear = [name for name, found in model.named_modules() if isinstance(found, nn.Linear)]
        raise UsageError(
            f"lora: peft cannot put adapters into the model, a {type(model).__name__}: {error} "
            f"Linear layers: {', '.join(sorted({name.split('.')[-1] for name in linear}))}."
        ) from None  # it says all that peft does
    _refuse_missing(model, own.modules_to_save or ())


def has_adapters(model: nn.Module) -> bool:
    return _ADAPTER in getattr(model, "peft_config", {})


def save_adapters(model: nn.Module, out: str | Path) -> list[str]:
    """Write the adapters of a model as `peft.PeftModel.from_pretrained(base, out)` reads them.

    `out` must not exist. The base is the model without adapters, with the weights that it had when
    they were put into it. Returns the names of what was written.
    """
    peft = require("peft", "adapt")
    config = copy.deepcopy(_config_of(model))
    config.inference_mode = True  # as peft writes them
    found = peft.get_peft_model_state_dict(
        model, adapter_name=_ADAPTER, save_embedding_layers=False
    )
    weights = ModelWeights(as_weights({f"{_PREFIX}{name}": t for name, t in found.items()}))
    with new_directory(Path(out)) as folder:
        write_file(weights, weights.names, folder / WEIGHTS, {"format": "pt"})
        config.save_pretrained(folder)
    return list(found)


def merge_adapters(model: nn.Module) -> nn.Module:
    """The model with its adapters added to its weights, under the names that it had without them.

    It is changed in place, and is afterwards a plain model.
    """
    _config_of(model)
    adapted = _adapted_layers(model)
    _refuse_shared(model, adapted)
    for name, module in adapted.items():
        if hasattr(module, "unload_and_optionally_merge_module"):  # peft knows how
            plain = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            module.merge(safe_merge=True)
            plain = module.get_base_layer()
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    del model.peft_config
    return model


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that peft has put into a model, but not those inside of them."""
    utils = require("peft.utils", "adapt")
    layers = require("peft.tuners.tuners_utils", "adapt").BaseTunerLayer
    kinds = (layers, utils.AuxiliaryTrainingWrapper)
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, kinds) and not inside:
            found[name] = module
    return found


def _refuse_shared(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """A weight that another module uses as it is cannot take up an adapter."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in layers.items():
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        if uses[id(getattr(base, "weight", None))] > 1:
            raise UsageError(
                f"The adapter of {name} cannot be merged: another part of the model uses the same "
                "weight without it. Write the adapters alone (--to peft), or let them out there."
            )


def _config_of(model: nn.Module) -> Any:
    if not has_adapters(model):
        raise UsageError(
            f"The model, a {type(model).__name__}, has no adapters. shoal.slim.adapt(run, "
            "lora=...) puts them in; name that recipe."
        )
    configs: Any = model.peft_config
    return configs[_ADAPTER]


def _refuse_missing(model: nn.Module, names: Sequence[str]) -> None:
    """peft passes over a module of `modules_to_save` that the model does not have."""
    known = [name for name, _ in model.named_modules() if name]
    for wanted in names:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in known):
            raise UsageError(
                f"lora: modules_to_save has {wanted!r}, and the model has no such module. "
                f"{nearest(wanted, known)}"
            )
