"""A user sees his own line first, and no frames of Shoal."""

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.plans.plan import Plan
from shoal.system.traces import user_traceback
from shoal.training.recipe import load_recipe
from shoal.training.run import call_model

MODEL = """
    from torch import nn

    class Bad(nn.Module):
        def forward(self, x):
            return x @ x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Bad()

        def forward(self, x):
            return self.inner(x)
"""


def raised_by(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (that is what is looked at)
        return error
    raise AssertionError("nothing was raised")


def test_the_users_line_comes_first_and_calls_of_modules_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MODEL))
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    model: nn.Module = space["Outer"]()
    text = user_traceback(raised_by(lambda: model(torch.ones(2, 3))))
    assert text.startswith(f"{path}:6, in forward: return x @ x\n")
    assert "_call_impl" not in text and text.count(f'File "{path}"') == 2
    assert "RuntimeError: mat1 and mat2" in text


def test_frames_of_shoal_are_left_out_of_causes_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def small():\n    return 1 / 0\n")
    text = user_traceback(raised_by(lambda: load_recipe(f"{path}:small", {})))
    assert text.startswith(f"{path}:2, in small: return 1 / 0\n")
    assert "training/recipe.py" not in text and "ZeroDivisionError" in text


def test_an_error_of_shoal_alone_keeps_its_frames() -> None:
    error = raised_by(lambda: Plan.parse("data=two"))
    assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # without those of this file
    assert "plans/plan.py" in user_traceback(error)


def test_a_forward_of_torch_alone_is_without_frames_of_shoal() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))
    error = raised_by(lambda: call_model(model, torch.ones(2, 3)))
    assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # without those of this file
    text = user_traceback(error)
    assert "training/run.py" not in text and "linear.py" in text and "RuntimeError: mat1" in text


def test_the_text_of_another_process_is_kept() -> None:
    def fails() -> None:
        raise ValueError("here") from RuntimeError("\nmine.py:3, in sample: its own line")

    assert "mine.py:3, in sample" in user_traceback(raised_by(fails))
