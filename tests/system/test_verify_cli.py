"""`shoal verify` on the command line: exit codes, what is printed, what is refused and left."""

import signal
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool
from shoal.verify import verify as verification
from tests.support import faults
from tests.support.faults import Trained
from tests.support.leaks import descendants, is_alive, wait_until

TINY = str(Path(__file__).with_name("tiny.py"))


def shoal_verify(pool: Pool, directory: Path, *words: str) -> Trained:
    output, errors = directory / "output", directory / "errors"
    command = pool.start(
        run_here, ["verify", *words], output=output, errors=errors, directory=directory
    )
    code = command.wait()
    return Trained(code, output.read_text(), errors.read_text(), directory / "runs")


def test_the_same_result(pool: Pool, tmp_path: Path) -> None:
    words = (f"{TINY}:line", "--plan", "data=2", "--steps", "3", "--json")
    done = shoal_verify(pool, tmp_path, *words)
    assert done.exit_code == 0, done.errors
    assert "under 'data=2 pieces=2' against one process, 3 steps" in done.errors
    assert "SAME: losses, gradients, weights and buffers are identical" in done.last_words
    result = done.result
    assert result["verdict"] == "SAME" and result["passed"] and result["identical"]
    assert result["plan"] == "data=2 pieces=2" and result["exit_code"] == 0
    assert msgspec.json.encode(result), "one JSON object"
    (run_dir,) = done.run_dir.iterdir()
    assert run_dir.name == "verify-tiny-line-1"
    assert not (run_dir / "verify").exists(), "the records of steps are removed"


def test_a_batch_that_quarantine_emptied_is_the_same_too(pool: Pool, tmp_path: Path) -> None:
    recipe = str(Path(__file__).parents[1] / "faults" / "tiny.py")
    words = (f"{recipe}:emptied", "--set", f"file={tmp_path / 'bad.jsonl'}", "--plan", "data=2")
    done = shoal_verify(pool, tmp_path, *words, "--steps", "5")
    assert done.exit_code == 0, done.errors
    assert "SAME: losses, gradients, weights and buffers are identical" in done.last_words


def test_callbacks_are_those_of_the_reference_too(pool: Pool, tmp_path: Path) -> None:
    """Rates fall, parameters rest, and the training ends after the same step."""
    recipe = str(Path(__file__).parents[1] / "faults" / "tiny.py")
    words = (f"{recipe}:called", "--plan", "data=2", "--set", "pause=0", "--set", "patience=2")
    done = shoal_verify(pool, tmp_path, *words, "--steps", "60", "--json")
    assert done.exit_code == 0, done.errors
    assert done.result["verdict"] == "SAME" and 5 < done.result["num_steps"] < 60


UNLIKE = """
import dataclasses, os
import shoal
from tests.system import tiny

class Leaves(shoal.Callback):
    def on_step(self, trainer, info):
        if info.step == 2 and "SHOAL_MEMBER" in os.environ:  # and so not in the reference
            trainer.stop()

def line():
    return dataclasses.replace(tiny.line(), callbacks=[Leaves()])
"""


def test_a_run_that_ends_before_its_reference_is_not_as_planned(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "unlike.py").write_text(UNLIKE)
    words = ("unlike.py:line", "--plan", "data=2", "--steps", "4")
    done = shoal_verify(pool, tmp_path, *words)
    assert done.exit_code == 1, done.errors
    assert "NOT AS PLANNED: it ended after step 2, and one process goes on" in done.last_words


HANGS = """
import dataclasses, os, time
from tests.system import tiny

def line():
    run = tiny.line()

    def loss(output, target):
        while os.environ.get("RANK") == "1":
            time.sleep(0.1)
        return run.loss(output, target)

    return dataclasses.replace(run, loss=loss)
"""


def verify_soon(words: list[str]) -> int:
    verification.STOP_S = 0.5
    return run_here(words)


def test_a_verify_that_hangs_ends_when_it_is_told_to(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    words = ["verify", "hangs.py:line", "--plan", "data=2", "--run-dir", "run"]
    logs = {"output": tmp_path / "output", "errors": tmp_path / "errors", "directory": tmp_path}
    command = pool.start(verify_soon, words, **logs)
    assert wait_until(lambda: bool(faults.events(tmp_path / "run", "formed")), 40)
    processes = descendants(command.pid)
    command.send_signal(signal.SIGTERM)
    assert command.wait(20) == 128 + signal.SIGTERM
    assert "rank 1 at loss (" in (tmp_path / "errors").read_text()
    assert wait_until(lambda: not any(map(is_alive, processes)), 10)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((f"{TINY}:line", "--set", "steps=3"), 2, "with --steps, not with --set"),
        ((f"{TINY}:line", "--plan", "data=3"), 2, "data=3 does not divide the batch of 8"),
        ((f"{TINY}:line", "--steps", "0"), 2, "--steps"),
        ((f"{TINY}:fails",), 1, "a key of the recipe's own"),
        ((f"{TINY}:absent",), 2, "has no recipe 'absent'"),
    ],
)
def test_what_cannot_be_verified_leaves_nothing(
    pool: Pool, tmp_path: Path, words: tuple[str, ...], code: int, told: str
) -> None:
    done = shoal_verify(pool, tmp_path, *words)
    assert done.exit_code == code, done.errors
    assert told in done.last_words
    assert not [path for path in done.run_dir.rglob("*") if path.is_file()]
