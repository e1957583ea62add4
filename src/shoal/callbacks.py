"""Callbacks for a Run: `Run(callbacks=[shoal.callbacks.EarlyStopping("loss", patience=5)])`.

The names that a recipe uses; see `training/standard_callbacks.py` for each of them.
"""

from shoal.training.callbacks import Callback, TrainingInfo
from shoal.training.controls import TrainingControl
from shoal.training.standard_callbacks import (
    EMA,
    BestCheckpoint,
    EarlyStopping,
    Freeze,
    LogEvery,
    ReduceOnPlateau,
    TorchScheduler,
)

__all__ = [
    "EMA",
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "Freeze",
    "LogEvery",
    "ReduceOnPlateau",
    "TorchScheduler",
    "TrainingControl",
    "TrainingInfo",
]
