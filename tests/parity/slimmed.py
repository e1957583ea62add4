"""Runs with masks, with a teacher, and with rounding: recipes for tests of plans."""

import dataclasses
from collections.abc import Callable

import shoal
from tests import zoo


def _gpt() -> shoal.Run:
    return zoo.gpt()


def magnitude() -> shoal.Run:
    return shoal.slim.prune_in_training(_gpt(), 0.8)


def movement() -> shoal.Run:
    return shoal.slim.prune_in_training(_gpt(), 0.8, "movement")


def pattern() -> shoal.Run:
    return shoal.slim.prune_in_training(zoo.cnn(), 0.5, "2:4")


def structured() -> shoal.Run:
    return shoal.slim.prune_in_training(_gpt(), 0.5, "structured")


def taught() -> shoal.Run:
    return shoal.slim.distill(_gpt(), _teacher(_gpt))


def taught_in_loaders() -> shoal.Run:
    return dataclasses.replace(taught(), loaders=1)


def taught_layers() -> shoal.Run:
    return shoal.slim.distill(_gpt(), _teacher(_gpt), hidden={"blocks.0": "blocks.1"})


def taught_apart(teacher: str) -> shoal.Run:
    return shoal.slim.distill(_gpt(), teacher, teacher_recipe=_gpt, teachers=1)


def rounded() -> shoal.Run:
    return shoal.slim.quantize_in_training(_gpt())


def _teacher(recipe: Callable[[], shoal.Run]) -> object:
    return dataclasses.replace(recipe(), seed=7).make_model()
