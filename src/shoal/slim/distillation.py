"""`distill`: a Run in which a student learns from a teacher's answers as well as from the data.

The teacher is part of the data: where a batch is put together, it is asked about the inputs, and
its answers go with the target to the loss. So the model of the run is the student alone, under its
own names: every plan, checkpoint and proof works on it as before, and the teacher is in no
checkpoint. It is held once a host, frozen, in evaluation mode. With `loaders=N` in the Run it works
in processes beside the ranks, ahead of them; with `teachers=N` in N processes of its own, out of
which no rank holds its memory (`teacher_processes.py`); with a cache it is asked once about each
sample, by one process, for all ranks, passes and runs.

The loss is (1 - alpha) times the recipe's own, plus alpha times the divergence of the answers at a
temperature (Hinton et al. 2015), whose square keeps gradients as large. A target of numbers makes
it the mean square of the difference. Hidden layers are compared after a projection (Romero et al.
2015), which is trained with the student. Cost: the teacher's forward; the answers, as large as the
student's own. The teacher computes on the CPU. Read next: `lessons.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.api import name_of, recipe_of
from shoal.data.cache.cached import cached
from shoal.data.sources import stream_of
from shoal.errors import ShoalError, UsageError
from shoal.slim.figures import (
    ModelTable,
    figures_of,
    first_piece,
    notes_of,
    num_bytes_at,
    num_bytes_of,
)
from shoal.slim.lessons import (
    HIDDEN,
    LOGITS,
    OUTPUT,
    TAPPED,
    TARGET,
    TEACHER,
    AnyTeacher,
    LayerTaps,
    LessonCollate,
    LessonSource,
    Teacher,
    answer_of,
    is_lesson,
)
from shoal.slim.results import new_place, write_weights
from shoal.slim.retraining import Given, Training, train_changed, trained_model
from shoal.slim.teacher_processes import TeacherProcesses
from shoal.training.load import load, loads_by_itself
from shoal.training.run import MINIMISED, MOST_LOADERS, Run, call_model

_NUM_SAMPLES = 2  # that shapes are compared with


@dataclass(frozen=True)
class Lessons:
    """How a student learns from its teacher."""

    temperature: float = 2.0
    alpha: float = 0.5  # the teacher's part of the loss
    hidden: Mapping[str, str] = field(default_factory=dict)  # the student's layer -> the teacher's
    cache: str | Path | None = None  # a directory that keeps the teacher's answers
    teachers: int = 0  # processes of the teacher's own, on each host

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise UsageError(
                f"alpha={self.alpha:g}: it is the teacher's part of the loss, above 0 and at most "
                "1. Without a teacher the recipe trains by itself."
            )
        if type(self.teachers) is not int or not 0 <= self.teachers <= MOST_LOADERS:
            raise UsageError(
                f"teachers={self.teachers!r} must be a whole number from 0, to ask the teacher "
                f"where batches are made, to {MOST_LOADERS}: as many processes of its own."
            )
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature:g} must be above 0. 2 to 5 is usual.")


class DistillTable(ModelTable, frozen=True, kw_only=True):
    """What `shoal distill --json` prints, beside the exit code. `before` is the teacher."""

    teacher: str


def distill(
    run: Run,
    teacher: nn.Module | str | Path,
    *,
    teacher_recipe: Given | None = None,
    teacher_settings: Mapping[str, Any] | None = None,
    temperature: float = 2.0,
    alpha: float = 0.5,
    hidden: Mapping[str, str] | None = None,
    cache: str | Path | None = None,
    teachers: int = 0,
) -> Run:
    """The run, in which its model learns from `teacher` too: a module, or what `shoal.load` takes.

    A path to weights needs `teacher_recipe`, which makes the teacher's model with
    `teacher_settings`. `alpha` is the
    teacher's part of the loss; `hidden` names layers of the student and of the teacher that are
    compared as well; `cache` is a directory that keeps the answers. `teachers` is the number of
    processes of its own on each host that a teacher at a path computes in, ahead of the ranks.
    """
    lessons = Lessons(temperature, alpha, hidden or {}, cache, teachers)
    _refuse_unteachable(run)
    make = partial(_teacher, teacher, teacher_recipe, teacher_settings, lessons)
    asked = _in_processes(teacher, make, teachers) if teachers else make()
    student = run.make_model()
    projections = _check_fit(run, student, asked, lessons)
    data: Any = LessonSource(run.data, asked if lessons.cache is not None else None, run.collate)
    if lessons.cache is not None:
        data = cached(data, memory=None, disk=lessons.cache)
    made = _StudentModel(run.model, projections) if projections else run.model
    return replace(
        run,
        model=made,
        data=data,
        collate=LessonCollate(run.collate, asked),
        loaders=max(run.loaders, teachers),  # which wait for it beside the ranks
        loss=DistillationLoss(run.loss, lessons, asked.fingerprint),
    )


def _teacher(
    teacher: nn.Module | str | Path,
    recipe: Given | None,
    settings: Mapping[str, Any] | None,
    lessons: Lessons,
) -> Teacher:
    found = teacher if isinstance(teacher, nn.Module) else load(teacher, recipe, settings=settings)
    return Teacher(found, tuple(lessons.hidden.values()))


def _in_processes(
    teacher: nn.Module | str | Path, make: Callable[[], Teacher], num: int
) -> TeacherProcesses:
    if isinstance(teacher, nn.Module):
        raise UsageError(
            f"teachers={num}: a teacher that is a module is in this process already, and so in all "
            "ranks. Give a path that its own processes can load."
        )
    return TeacherProcesses(make, num)


def distill_recipe(
    run: Run,
    recipe: Given,
    teacher: str | Path,
    teacher_recipe: Given | None,
    teacher_settings: Mapping[str, Any] | None,
    lessons: Mapping[str, Any],
) -> Run:
    """`distill` of a run whose own recipe makes the teacher, too, where nothing else does."""
    if teacher_recipe is None and not loads_by_itself(teacher):
        teacher_recipe = recipe
    made: dict[str, Any] = {"teacher_recipe": teacher_recipe, "teacher_settings": teacher_settings}
    return distill(run, teacher, **made, **lessons)


def train_student(
    recipe: Given,
    teacher: str | Path,
    *,
    out: str | Path,
    teacher_recipe: Given | None = None,
    teacher_settings: Mapping[str, Any] | None = None,
    lessons: Lessons | None = None,
    settings: Mapping[str, Any] | None = None,
    training: Training | None = None,
) -> DistillTable:
    """Train the model of a recipe with a teacher, and write it to `out`, without the teacher.

    Weights of a teacher are those of `teacher_recipe`, or of the student's own recipe with other
    settings.
    """
    place, settings = new_place(out), settings or {}
    if teacher_recipe is None and not loads_by_itself(teacher):
        teacher_recipe = recipe
    change = partial(
        distill_recipe,
        recipe=recipe,
        teacher=teacher,
        teacher_recipe=teacher_recipe,
        teacher_settings=teacher_settings,
        lessons=vars(lessons or Lessons()),
    )
    outcome = train_changed(recipe, settings, change, training or Training())
    run, _ = recipe_of(recipe, settings).load()
    student = trained_model(outcome)
    if isinstance(student, StudentWithTaps):
        student = student.student
    model = load(teacher, teacher_recipe, settings=teacher_settings)
    before = figures_of(run, model, num_bytes_of(model))  # which may fail: nothing is written
    write_weights(run, student, place, name_of(recipe)[0])
    return DistillTable(
        before=before,
        after=figures_of(run, load(place, run), num_bytes_at(place)),
        out=str(place),
        teacher=str(teacher),
        notes=notes_of(run, "before is the teacher, after the student."),
    )


class DistillationLoss:
    """The loss of a run with a teacher. Given a plain target, as in evaluation, it is the run's."""

    def __init__(self, loss: Any, lessons: Lessons, teacher: str):
        self._loss, self._lessons = loss, lessons
        name = getattr(loss, "__qualname__", type(loss).__name__)
        # Records keep it, so that a run goes on with the teacher that it began with.
        self.__qualname__ = (
            f"distilled({name}, teacher {teacher}, temperature {lessons.temperature:g}, alpha "
            f"{lessons.alpha:g})"
        )

    def __call__(self, output: Any, target: Any) -> Any:
        if not is_lesson(target):
            return self._loss(output, target)
        taught, own = target[TEACHER], target[TARGET]
        hidden: Any = ()
        if isinstance(output, Mapping) and TAPPED in output:
            output, hidden = output[OUTPUT], output[TAPPED]
        alpha = self._lessons.alpha
        task = self._loss(output, own)
        soft = divergence(answer_of(output), taught[LOGITS], own, self._lessons.temperature)
        for number, found in enumerate(hidden):
            soft = soft + F.mse_loss(found, taught[f"{HIDDEN}{number}"])
        return _mixed(task, soft, alpha)


def _mixed(task: Any, soft: Tensor, alpha: float) -> Any:
    """Both losses, in the form of the task's: a mean, a sum with a weight, or named parts."""
    if isinstance(task, Mapping) and MINIMISED in task:
        return {**task, MINIMISED: _mixed(task[MINIMISED], soft, alpha)}
    if isinstance(task, tuple):
        total, weight = task
        return (1 - alpha) * total + alpha * soft * weight, weight
    return (1 - alpha) * task + alpha * soft


def divergence(student: Tensor, teacher: Tensor, target: Any, temperature: float) -> Tensor:
    """How far the student's answers are from the teacher's, as a mean over what is answered.

    Classes of a whole-number target are compared as distributions; those that its target leaves
    out, below 0, do not count. All else is compared number by number.
    """
    if not isinstance(target, Tensor) or target.is_floating_point():
        return F.mse_loss(student, teacher)
    dim = 1 if target.shape != student.shape[:-1] else -1
    if target.shape != student.movedim(dim, -1).shape[:-1]:
        return F.mse_loss(student, teacher)
    ours = (student / temperature).log_softmax(dim)
    theirs = (teacher.to(student.dtype) / temperature).log_softmax(dim)
    each = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim)
    counts = (target >= 0).to(each.dtype)
    return temperature**2 * (each * counts).sum() / counts.sum().clamp(min=1)


class StudentWithTaps(nn.Module):
    """A student that gives its hidden layers, too, while it trains; with projections for them."""

    def __init__(self, student: nn.Module, projections: "Mapping[str, Projection]"):
        super().__init__()
        self.student = student
        self.projections = nn.ModuleList(
            nn.Identity() if one.is_identity else nn.Linear(one.width, one.wanted)
            for one in projections.values()
        )
        self._dims = [one.dim for one in projections.values()]
        self._taps = LayerTaps(student, tuple(projections))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return self.student(*args, **kwargs)
        with self._taps.listening() as heard:
            output = self.student(*args, **kwargs)
        found = [
            projection(layer.movedim(dim, -1)).movedim(-1, dim)
            for projection, layer, dim in zip(self.projections, heard.in_order(), self._dims)
        ]
        return {OUTPUT: output, TAPPED: tuple(found)}


@dataclass(frozen=True)
class Projection:
    """From the width of a student's layer to that of the teacher's, along one dim."""

    dim: int
    width: int
    wanted: int

    @property
    def is_identity(self) -> bool:
        return self.width == self.wanted


class _StudentModel:
    """Makes the student of a run, with projections."""

    def __init__(self, model: Any, projections: Mapping[str, Projection]):
        self._model, self._projections = model, projections
        layers = ", ".join(projections)
        name = getattr(model, "__qualname__", type(model).__name__)
        self.__qualname__ = f"student({name}, {layers})"

    def __call__(self) -> nn.Module:
        return StudentWithTaps(self._model(), self._projections)


def _refuse_unteachable(run: Run) -> None:
    if run.loss is None:
        raise UsageError(
            "The run has a step of its own and no loss(output, target) that a teacher could be "
            "part of. Ask the teacher in that step, or give the Run a loss."
        )
    if stream_of(run.data) is not None:
        raise UsageError(
            "The data is a stream, and a teacher is asked about samples of a source with a length. "
            "Build shards of it (`shoal data build`), and train on those."
        )


@torch.no_grad()
def _check_fit(
    run: Run, student: nn.Module, teacher: AnyTeacher, lessons: Lessons
) -> dict[str, Projection]:
    """Compare the shapes of both on a few samples, before anything is trained."""
    piece = first_piece(run, _NUM_SAMPLES)
    try:
        taught = teacher(piece.inputs)
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 (of any kind: it was made for other inputs)
        what = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"The teacher, a {teacher.kind}, cannot be called with the student's inputs: {what}. "
            "Both get the inputs of the recipe's data."
        ) from None
    taps = LayerTaps(student, tuple(lessons.hidden))
    student.eval()
    with taps.listening() as heard:
        own = answer_of(call_model(student, piece.inputs))
    if own.shape != taught[LOGITS].shape:
        raise UsageError(
            f"The teacher's outputs do not fit: for {piece.num_samples} samples it gives "
            f"{list(taught[LOGITS].shape)}, and the student {list(own.shape)}. They are compared "
            "number by number; teach with a model that has the same outputs."
        )
    layers = zip(lessons.hidden.items(), heard.in_order())
    return {
        name: _projection(f"{name}={theirs}", layer, taught[f"{HIDDEN}{number}"])
        for number, ((name, theirs), layer) in enumerate(layers)
    }


def _projection(names: str, student: Tensor, teacher: Tensor) -> Projection:
    """What makes one layer's shape the other's: a matrix along the one dim in which they differ."""
    pairs = list(enumerate(zip(student.shape, teacher.shape)))
    unlike = [dim for dim, (one, other) in pairs if one != other]
    if student.dim() != teacher.dim() or len(unlike) > 1 or 0 in unlike:
        raise UsageError(
            f"--hidden {names}: the student's layer gives {list(student.shape)} and the teacher's "
            f"{list(teacher.shape)}. They may differ in one dim, their width, which a projection "
            "brings together."
        )
    dim = unlike[0] if unlike else student.dim() - 1
    return Projection(dim, student.shape[dim], teacher.shape[dim])
