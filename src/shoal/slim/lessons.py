"""A teacher's answers as part of a batch: asked where samples are put together, or once for all.

A sample of the data becomes a lesson: its target is a dict with the target itself, and with the
teacher's answers if they are kept by a cache. Where they are not, they are computed when a piece is
collated, from its inputs alone, so they have the same bits on whichever rank or loader does it.
Samples of an evaluation are no lessons, and stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from shoal.checkpoint.dtypes import tensor_bytes
from shoal.data.batches import to_device
from shoal.data.collating import collate_samples
from shoal.data.sources import Pass
from shoal.data.transforms.fingerprint import digest, identity_of
from shoal.data.transforms.wrapped import WrappedSource
from shoal.errors import RecipeError, UsageError, nearest
from shoal.training.run import call_model

TARGET, TEACHER = "shoal.target", "shoal.teacher"  # in the target of a lesson
LOGITS, HIDDEN = "logits", "hidden"  # in the teacher's answers
OUTPUT, TAPPED = "shoal.output", "shoal.hidden"  # in what a student with taps gives
Collate = Callable[[list[Any]], Any]


def is_lesson(target: Any) -> bool:
    """Whether a target has a teacher's answers beside it."""
    return isinstance(target, Mapping) and TARGET in target


def answer_of(output: Any) -> Tensor:
    """The logits, or numbers, of a model's output: itself, its `logits`, or its first tensor."""
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = output.get(LOGITS)
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    found = output if found is None else found
    if not isinstance(found, Tensor):
        raise UsageError(
            f"The model answers with a {type(output).__name__}. Answers of teacher and student are "
            "compared as one tensor: the output itself, its `logits`, or the first of a tuple."
        )
    return found


class AnyTeacher(Protocol):
    """What answers: a model in this process, or in others (`teacher_processes.py`)."""

    kind: str
    fingerprint: str

    def __call__(self, inputs: Any) -> dict[str, Tensor]: ...


class Teacher:
    """A frozen model that is asked about inputs."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...] = ()):
        self.kind = type(model).__name__
        self._model = model.eval()
        for p in model.parameters():
            p.requires_grad_(False)
        self._taps = LayerTaps(model, layers)
        hashed = xxhash.xxh3_64(f"{self.kind} {layers}".encode())
        for name, tensor in model.state_dict().items():
            hashed.update(name.encode())
            for part in _plain_parts(tensor):
                hashed.update(tensor_bytes(part))
        self.fingerprint = hashed.hexdigest()

    @torch.no_grad()
    def __call__(self, inputs: Any) -> dict[str, Tensor]:
        """The answers to a batch: logits, and the layers that were asked for.

        Inputs lie as they would if they came from another process: kernels round by that.
        """
        inputs = tree_map(_in_rows, to_device(inputs, "cpu"))
        with self._taps.listening() as heard:
            answers = {LOGITS: answer_of(call_model(self._model, inputs))}
        return answers | {f"{HIDDEN}{at}": layer for at, layer in enumerate(heard.in_order())}


def _in_rows(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a quantised one is made of; any other is its own part."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))


class LayerTaps:
    """Hears what layers of a model give, by their names."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        known = {name: layer for name, layer in model.named_modules() if name}
        for name in names:
            if name not in known:
                raise UsageError(
                    f"{type(model).__name__} has no layer {name!r}. {nearest(name, known)}"
                )
        self._names = names
        self._layers = [known[name] for name in names]

    @contextmanager
    def listening(self) -> "Iterator[HeardLayers]":
        heard = HeardLayers(self._names)
        hooks = [
            layer.register_forward_hook(heard.hook(name))
            for name, layer in zip(self._names, self._layers)
        ]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()


class HeardLayers:
    """What layers gave in one forward."""

    def __init__(self, names: tuple[str, ...]):
        self._names, self._found = names, dict[str, Tensor]()

    def hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hear(module: nn.Module, args: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple | list) else output
            if isinstance(found, Tensor):
                self._found[name] = found

        return hear

    def in_order(self) -> list[Tensor]:
        """The layers' outputs, in the order in which they were asked for."""
        missing = [name for name in self._names if name not in self._found]
        if missing:
            raise RecipeError(f"The layer {missing[0]} gave no tensor in this forward.")
        return [self._found[name] for name in self._names]


class LessonSource(WrappedSource):
    """Samples as lessons: with the teacher's answers if there is one, else for the collate."""

    def __init__(self, source: Any, teacher: AnyTeacher | None, collate: Collate | None):
        super().__init__(source)
        self._teacher, self._collate = teacher, collate

    def _change(self, sample: Any, index: int, of: Pass) -> Any:
        inputs, target = sample
        if self._teacher is None:
            return inputs, {TARGET: target}
        batch, _ = collate_samples([sample], self._collate)
        answers = self._teacher(batch)
        return inputs, {TARGET: target, TEACHER: {k: v[0] for k, v in answers.items()}}

    def identity(self) -> str:
        """Names its samples: those below, and the teacher."""
        teacher = "" if self._teacher is None else self._teacher.fingerprint
        return digest("lessons", identity_of(self.source), teacher)


class LessonCollate:
    """Collates lessons, and asks the teacher about them; other samples as the run does."""

    def __init__(self, collate: Collate | None, teacher: AnyTeacher):
        self._collate, self._teacher = collate, teacher
        self.__qualname__ = getattr(collate, "__qualname__", "lessons")  # which records keep

    def __call__(self, samples: list[Any]) -> Any:
        if not is_lesson(samples[0][1]):
            return collate_samples(samples, self._collate)
        plain = [(inputs, lesson[TARGET]) for inputs, lesson in samples]
        inputs, target = collate_samples(plain, self._collate)
        kept = [lesson.get(TEACHER) for _, lesson in samples]
        answers = self._teacher(inputs) if kept[0] is None else _stacked(kept)
        return inputs, {TARGET: target, TEACHER: answers}


def _stacked(kept: list[Any]) -> Any:
    try:
        return default_collate(kept)
    except (RuntimeError, TypeError) as error:
        raise RecipeError(
            f"The teacher's answers are of unlike sizes ({error}), and cannot be kept sample by "
            "sample. Leave the cache out, or pad samples to one size."
        ) from error
