"""Shoal: train any PyTorch model on many processes and machines.

The public names, loaded when first used, so that `import shoal` costs next to nothing. Type
checkers see them all the same (`py.typed`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import callbacks as callbacks
    from shoal import data as data
    from shoal.api import evaluate as evaluate
    from shoal.api import train as train
    from shoal.errors import ShoalError as ShoalError
    from shoal.errors import UsageError as UsageError
    from shoal.events.step import StepInfo as StepInfo
    from shoal.events.step import every as every
    from shoal.inference.predictor import Predictor as Predictor
    from shoal.inference.predictor import predict as predict
    from shoal.inference.text import generate as generate
    from shoal.launch.evaluate import Evaluation as Evaluation
    from shoal.launch.outcome import Outcome as Outcome
    from shoal.launch.script import trainer as trainer
    from shoal.numerics import losses as losses
    from shoal.numerics import schedules as schedules
    from shoal.numerics.optimizers import Optimizers as Optimizers
    from shoal.numerics.rowwise import RowwiseAdagrad as RowwiseAdagrad
    from shoal.numerics.table import Table as Table
    from shoal.plans.plan import Plan as Plan
    from shoal.training.callbacks import Callback as Callback
    from shoal.training.custom_step import StepBatch as StepBatch
    from shoal.training.load import load as load
    from shoal.training.run import Run as Run
    from shoal.tuning.results import StudyOutcome as StudyOutcome
    from shoal.tuning.tune import tune as tune

__version__ = "0.1.0"

_HOME = {
    "Callback": "shoal.training.callbacks",
    "Evaluation": "shoal.launch.evaluate",
    "Optimizers": "shoal.numerics.optimizers",
    "Outcome": "shoal.launch.outcome",
    "Plan": "shoal.plans.plan",
    "Predictor": "shoal.inference.predictor",
    "Run": "shoal.training.run",
    "RowwiseAdagrad": "shoal.numerics.rowwise",
    "ShoalError": "shoal.errors",
    "StepBatch": "shoal.training.custom_step",
    "StepInfo": "shoal.events.step",
    "StudyOutcome": "shoal.tuning.results",
    "Table": "shoal.numerics.table",
    "UsageError": "shoal.errors",
    "evaluate": "shoal.api",
    "every": "shoal.events.step",
    "generate": "shoal.inference.text",
    "load": "shoal.training.load",
    "predict": "shoal.inference.predictor",
    "train": "shoal.api",
    "trainer": "shoal.launch.script",
    "tune": "shoal.tuning.tune",
}
_MODULES = {
    "callbacks": "shoal.callbacks",
    "data": "shoal.data",
    "losses": "shoal.numerics.losses",
    "schedules": "shoal.numerics.schedules",
}

__all__ = [*_HOME, *_MODULES]  # noqa: PLE0604


if not TYPE_CHECKING:  # which knows the names above, and should find those that are misspelt

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
