"""Runs with a model that is trained in part: recipes for tests of plans."""

import torch
from torch import nn

import shoal
from tests import zoo


def frozen_layers() -> shoal.Run:
    return shoal.slim.adapt(zoo.gpt(), freeze=["embed", "blocks.1"], layer_decay=0.7)


def with_rates() -> shoal.Run:
    """Groups of the recipe's own, which are split; and a head that is new."""
    return shoal.slim.adapt(
        zoo.bert(),
        rates={"*.bias": 0.5, "*classifier*": 10.0},
        head={"classifier": lambda: nn.Linear(zoo_width(), zoo.KINDS)},
        layer_decay=0.9,
    )


def zoo_width() -> int:
    model = zoo.bert().make_model()
    found = model.get_submodule("classifier")
    assert isinstance(found, nn.Linear)
    return found.in_features


def lora() -> shoal.Run:
    return shoal.slim.adapt(
        zoo.llama(), lora={"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
    )


def lora_dropout() -> shoal.Run:
    """On a model that is none of transformers, with dropout, and rates of the two matrices."""
    return shoal.slim.adapt(
        zoo.gpt(),
        lora={"r": 4, "alpha": 8, "targets": ["query_key_value", "widen"], "dropout": 0.1},
        rates={"*lora_B*": 4.0},
        head={"norm": lambda: nn.LayerNorm(_width())},
    )


def _width() -> int:
    norm = zoo.gpt().make_model().get_submodule("norm")
    assert isinstance(norm, nn.LayerNorm)
    return int(torch.Size(norm.normalized_shape)[0])
