"""A teacher in processes of its own: the bits of one in this process, deaths, bad input."""

import dataclasses
import gc
import os
import pickle
import signal
import socket
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import shoal
from shoal.errors import RecipeError, UsageError
from shoal.slim.distillation import distill
from shoal.slim.lessons import Teacher
from shoal.slim.teacher_processes import TeacherProcesses
from tests.support.leaks import wait_until
from tests.unit.slim.test_distillation import losses, run_of


class Large(nn.Sequential):
    """To be found among all objects of a process."""


def large() -> shoal.Run:
    made = partial(Large, nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return dataclasses.replace(run_of(), model=made)


class Dying(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return inputs


def keeper_of(teacher: TeacherProcesses) -> int:
    """The process that listens for questions."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(teacher._address)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(autouse=True)
def collected(no_leaks: None) -> Iterator[None]:
    """Batches refer to themselves, so only a collection ends a Run that they were made of."""
    yield
    gc.collect()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_model(large().make_model(), str(tmp_path / "teacher.safetensors"))
    return tmp_path / "teacher.safetensors"


def test_it_gives_the_same_bits_and_is_in_no_rank(weights: Path) -> None:
    asked = partial(distill, run_of(), weights, teacher_recipe=large, hidden={"0": "0"})
    apart = asked(teachers=2)
    assert apart.loaders == 2
    assert not any(isinstance(one, Large) for one in gc.get_objects())
    here = asked()
    assert apart.loss.__qualname__ == here.loss.__qualname__
    assert losses(dataclasses.replace(apart, loaders=0)) == losses(here)


def test_inputs_that_lie_in_columns_have_the_same_bits() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 3))
    here = Teacher(model)
    apart = TeacherProcesses(lambda: Teacher(model), 1)
    inputs = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert here(inputs)["logits"].equal(apart(inputs)["logits"])
    assert here(inputs)["logits"].equal(here(inputs.contiguous())["logits"])


def test_a_worker_that_dies_is_replaced(weights: Path) -> None:
    run = distill(run_of(), weights, teacher_recipe=large, teachers=2)
    teacher = run.collate._teacher  # type: ignore[union-attr]
    before = teacher(torch.ones(4, 6))["logits"]
    for worker in children_of(keeper_of(teacher)):
        os.kill(worker, signal.SIGKILL)
    assert teacher(torch.ones(4, 6))["logits"].equal(before)


def test_a_question_that_kills_is_refused() -> None:
    teacher = TeacherProcesses(lambda: Teacher(Dying()), 1)
    with pytest.raises(RecipeError, match="died 3 times over these samples"):
        teacher(torch.ones(2))


def test_without_their_keeper_they_are_gone(weights: Path) -> None:
    run = distill(run_of(), weights, teacher_recipe=large, teachers=2)
    teacher = run.collate._teacher  # type: ignore[union-attr]
    keeper = keeper_of(teacher)
    workers = children_of(keeper)
    os.kill(keeper, signal.SIGKILL)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers), 30)
    with pytest.raises(RecipeError, match=r"are gone.*Go on with --resume"):
        teacher(torch.ones(2, 6))


def test_they_end_with_the_run(weights: Path) -> None:
    run = distill(run_of(), weights, teacher_recipe=large, teachers=1)
    keeper = keeper_of(run.collate._teacher)  # type: ignore[union-attr]
    del run
    gc.collect()
    assert not Path(f"/proc/{keeper}").exists()


def test_read_in_another_process_it_starts_its_own() -> None:
    teacher = TeacherProcesses(_small, 1)
    again = pickle.loads(pickle.dumps(teacher))
    assert keeper_of(again) != keeper_of(teacher)
    assert again(torch.ones(2, 6))["logits"].equal(teacher(torch.ones(2, 6))["logits"])


def _small() -> Teacher:
    torch.manual_seed(3)
    return Teacher(nn.Linear(6, 3))


def test_what_fails_there_is_raised_here(weights: Path) -> None:
    asked = partial(distill, run_of(), teacher_recipe=large, teachers=1)
    with pytest.raises(UsageError, match="There is no /none"):
        asked("/none")
    with pytest.raises(UsageError, match="no layer 'nine'"):
        asked(weights, hidden={"0": "nine"})
    with pytest.raises(UsageError, match="is in this process already"):
        asked(large().make_model())
    with pytest.raises(UsageError, match="teachers=-1 must be a whole number"):
        asked(weights, teachers=-1)
    with pytest.raises(UsageError, match="student's inputs: RuntimeError: mat1 and mat2"):
        other = dataclasses.replace(run_of(), model=lambda: nn.Linear(7, 3))
        save_model(nn.Linear(7, 3), str(weights))
        distill(run_of(), weights, teacher_recipe=lambda: other, teachers=1)
    with pytest.raises(RecipeError, match="loads the teacher was killed by SIGKILL"):
        TeacherProcesses(lambda: Dying()(torch.ones(1)), 1)
