"""Models of Keras on torch: their parameters are in no module of their own, and "/" is in names."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
from torch import nn
from torch.nn import functional as F

import shoal
from tests.zoo import KINDS, adam, kinds, normal, run_of


def dense() -> nn.Module:
    hidden = [keras.layers.Dense(32, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(KINDS)])


def attention() -> nn.Module:
    inputs = keras.Input((8, 4))
    x = keras.layers.Dense(16)(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x)
    x = keras.layers.LayerNormalization()(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(KINDS)(x))


def run(model: str = "dense") -> shoal.Run:
    samples = normal(32)
    inputs = samples if model == "dense" else samples.view(-1, 8, 4).contiguous()
    made = {"dense": dense, "attention": attention}[model]
    return run_of(made, (inputs, kinds(samples)), F.cross_entropy, adam)
