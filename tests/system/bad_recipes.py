"""Recipes with one thing wrong each, for the tests of bad input."""

import dataclasses
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal

number = 3


def good(**changes: Any) -> shoal.Run:
    inputs = torch.linspace(-1, 1, 64)[:, None]
    run = shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(inputs, 2 * inputs),
        batch_size=8,
        steps=6,
    )
    return dataclasses.replace(run, **changes)


def fine(width: int = 1) -> shoal.Run:
    return good()


def fails() -> shoal.Run:
    raise KeyError("a key of the recipe's own")


def returns_a_dict() -> dict[str, int]:
    return {"steps": 3}


def loss_is_a_vector() -> shoal.Run:
    return good(loss=lambda output, target: (output - target)[:, 0] ** 2)


def loss_is_a_number() -> shoal.Run:
    return good(loss=lambda output, target: 1.5)


def loss_is_nan() -> shoal.Run:
    return good(loss=lambda output, target: F.mse_loss(output, target) * float("nan"))


def gradient_is_nan() -> shoal.Run:
    # The square root of zero: a finite loss whose slope is not.
    return good(loss=lambda output, target: ((output - output) * 0).abs().sqrt().mean())


def last_gradient_is_nan() -> shoal.Run:
    return dataclasses.replace(gradient_is_nan(), steps=1)


class Sharp(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            return closure()


def optimizer_wants_a_closure() -> shoal.Run:
    return good(optimizer=lambda named: Sharp(named, lr=0.1))


def model_is_made() -> shoal.Run:
    return good(model=nn.Linear(1, 1))


def model_is_no_module() -> shoal.Run:
    return good(model=lambda: "model")


def no_data() -> shoal.Run:
    return good(data=[])


def short_data() -> shoal.Run:
    return good(data=[(torch.zeros(1), torch.zeros(1))] * 5)


class Misnamed:
    """As over a folder with a file whose name is no text."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"{os.fsdecode(bytes([255]))}.jpg is broken")


def misnamed_data() -> shoal.Run:
    return good(data=Misnamed())


def misnamed_recipe() -> shoal.Run:
    raise ValueError(f"{os.fsdecode(bytes([255]))}.jpg is broken")


def nothing_to_evaluate() -> shoal.Run:
    return good(evaluate=[])


class Misspelt:
    def on_stpe(self, trainer: Any, info: Any) -> None: ...


def callback_is_misspelt() -> shoal.Run:
    return good(callbacks=[Misspelt()])


def callback_has_no_evaluation() -> shoal.Run:
    return good(callbacks=[shoal.callbacks.EarlyStopping("loss")])


def callback_freezes() -> shoal.Run:
    return good(callbacks=[shoal.callbacks.Freeze("weight")])


def callback_names_no_metric() -> shoal.Run:
    run = good(evaluate_every=2, evaluate=good().data)
    return dataclasses.replace(run, callbacks=[shoal.callbacks.EarlyStopping("accuracy")])


class Keeps(shoal.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"open": os.environ}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def callback_keeps_what_cannot_be_saved() -> shoal.Run:
    return good(callbacks=[Keeps()])


def schedule_is_a_scheduler() -> shoal.Run:
    return good(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)


def loss_has_no_loss() -> shoal.Run:
    return good(loss=lambda output, target: {"error": F.mse_loss(output, target)})
