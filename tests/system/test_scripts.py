"""`shoal run`: a script of one's own on several ranks, and the same script under torchrun."""

import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool
from tests.support.faults import Trained, Training
from tests.support.leaks import wait_until

SCRIPT = str(Path(__file__).with_name("scripts.py"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

Start = Callable[..., Training]


def starter(pool: Pool, tmp_path: Path) -> Start:
    """What starts `shoal run` with 2 ranks."""

    def begin(
        *words: str,
        ranks: int = 2,
        options: tuple[str, ...] = (),
        run_dir: Path | None = None,
        **variables: str,
    ) -> Training:
        run_dir = run_dir or tmp_path / f"run-{sum(1 for _ in tmp_path.glob('run-*.out'))}"
        command = pool.start(
            run_here,
            ["run", "--ranks", str(ranks), "--run-dir", str(run_dir), *options, SCRIPT, *words],
            environment={"OMP_NUM_THREADS": "1", **variables},
            output=run_dir.with_name(run_dir.name + ".out"),
            errors=run_dir.with_name(run_dir.name + ".err"),
            directory=tmp_path,
        )
        return Training(command, run_dir)

    return begin


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Start:
    return starter(pool, tmp_path)


def told(output: str) -> list[dict[str, Any]]:
    """The lines of JSON among what a script printed."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return [msgspec.json.decode(line) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the loop tells on 2 ranks."""
    trained = starter(pool, tmp_path_factory.mktemp("scripts"))("own-loop").wait()
    assert trained.exit_code == 0, trained.errors
    lines = told(trained.output)
    assert [line["step"] for line in lines[:-1]] == list(range(1, 9))
    return lines


def test_a_loop_of_ones_own_on_another_number_of_ranks(
    start: Start, undisturbed: list[dict[str, Any]]
) -> None:
    trained = start("own-loop", ranks=1).wait()
    assert trained.exit_code == 0, trained.errors
    # One piece is another cut of the batch than two, so dropout's draws differ; not the form.
    assert [line.keys() for line in told(trained.output)] == [u.keys() for u in undisturbed]


@pytest.mark.quick("1")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_is_replaced_and_the_numbers_are_the_same(
    start: Start, undisturbed: list[dict[str, Any]], rank: int
) -> None:
    training = start("slow-loop")
    training.wait_for_seats()
    assert wait_until(lambda: len(told(output_of(training))) >= 3, 20.0)
    training.signal_rank(rank, signal.SIGKILL)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.events("recovered")[0]["rank"] == rank
    lines = all_told(trained)
    known = {line["step"]: line for line in undisturbed if "step" in line}
    assert {line["step"] for line in lines if "step" in line} == set(known)
    for line in lines:
        assert line == (known[line["step"]] if "step" in line else undisturbed[-1])


def output_of(training: Training) -> str:
    log = training.run_dir / "logs" / "rank-000.log"
    return log.read_text() if log.exists() else ""


def all_told(trained: Trained) -> list[dict[str, Any]]:
    """By any process that sat in the first seat."""
    logs = sorted((trained.run_dir / "logs").glob("*-*.log"))
    return [line for log in logs for line in told(log.read_text())]


@pytest.fixture(scope="module")
def kept(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a loop that keeps and changes things ends with, on 2 ranks."""
    trained = starter(pool, tmp_path_factory.mktemp("kept"))("keeps").wait()
    assert trained.exit_code == 0, trained.errors
    ends = all_told(trained)
    assert ends[0] == ends[1] and ends[0]["count"] == 8
    assert ends[0]["groups"][0]["lr"] < 0.1, "the plateau was met"
    return ends


@pytest.mark.quick("step.computed:kill:member=1:step=4-")
@pytest.mark.parametrize(
    ("faults", "kill"),
    [
        ("step.computed:kill:member=1:step=4", ""),
        ("", "evaluate:0:5"),
        pytest.param("step.committed:kill:member=1:step=4", "", marks=pytest.mark.full),
        pytest.param("step.exchanged:kill:member=0:step=4", "", marks=pytest.mark.full),
        pytest.param("step.committed:kill:member=0:step=8", "", marks=pytest.mark.full),
        pytest.param("", "evaluated:1:3", marks=pytest.mark.full),
        pytest.param("", "evaluated:0:8", marks=pytest.mark.full),
        pytest.param(
            "step.computed:kill:member=0:step=4,handover.sharing:kill:member=2",
            "",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_a_loop_keeps_and_changes_outlives_a_rank(
    start: Start, kept: list[dict[str, Any]], faults: str, kill: str
) -> None:
    trained = start("keeps", SHOAL_FAULTS=faults, KILL=kill).wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.events("recovered")
    assert all_told(trained) == kept


@pytest.mark.quick("break")
@pytest.mark.parametrize("how", ["break", "stop-on-one", "stop-and-break-on-one"])
def test_an_early_end_is_a_success_and_saved(start: Start, tmp_path: Path, how: str) -> None:
    trained = start("ends", how).wait()
    assert trained.exit_code == 0, trained.errors
    assert told(trained.output) == [{"steps": 3, "stopped": False}]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000003"]


@pytest.mark.full
def test_a_script_that_hangs_is_ended_within_the_bound_of_a_stop(
    start: Start, tmp_path: Path
) -> None:
    training = start("ends", "hang", options=("--stop-timeout", "2"))
    assert wait_until((tmp_path / "hangs").exists, 30)
    training.command.send_signal(signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 128 + signal.SIGTERM
    assert "it was asked to stop, and no work was done for" in trained.errors


@pytest.mark.quick("rate-on-one-param_groups[0]['lr'] is 0.05 on rank 1 and 0.1 on rank 0.")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("break-on-one", "Rank 1 left its loop after step 3, and rank 0 goes on to step 4."),
        ("rate-on-one", "param_groups[0]['lr'] is 0.05 on rank 1 and 0.1 on rank 0."),
        pytest.param(
            "evaluate-on-one",
            "Rank 1 evaluates after step 3, and rank 0 goes on to step 4.",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "state-on-one",
            "trainer.state['seen'][1]['rank'] is 1 on rank 1 and 0 on rank 0.",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "freeze-on-one", "0.weight.requires_grad is False on rank 1", marks=pytest.mark.full
        ),
    ],
)
def test_ranks_that_act_unlike_are_named(start: Start, how: str, said: str) -> None:
    trained = start("ends", how).wait()
    assert trained.exit_code == 1, trained.errors
    assert said in trained.last_words


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("width", "shape of 0.weight is absent on rank 1 and float32 [4, 1] on rank 0."),
        pytest.param("rate", "is 0.2 on rank 1 and 0.1 on rank 0.", marks=pytest.mark.full),
        pytest.param("loss", "of Run.loss is that of l1_loss", marks=pytest.mark.full),
        pytest.param("seed", "Run.seed is 3 on rank 1 and 0 on rank 0.", marks=pytest.mark.full),
        pytest.param("plan", "the plan is 'data=1 tensor=2", marks=pytest.mark.full),
    ],
)
def test_unlike_ranks_are_refused_before_the_first_step(start: Start, what: str, said: str) -> None:
    trained = start("unlike", what).wait()
    assert trained.exit_code == 2, trained.errors
    assert "Ranks are about to train unlike things: " in trained.last_words
    assert said in trained.last_words and "reset by peer" not in trained.errors


def test_a_script_that_fails_on_one_rank(start: Start) -> None:
    trained = start("raises").wait()
    assert trained.exit_code == 1
    assert "LookupError: what this script was looking for" in trained.errors
    assert 'raise LookupError("what this script was looking for")' in trained.errors
    assert "rank 1 failed" in trained.last_words
    assert "GroupLost" not in trained.errors


def test_a_script_that_asks_for_servers_is_told_who_has_them(start: Start) -> None:
    trained = start("asks-for-servers").wait()
    assert trained.exit_code == 2
    assert "needs parameter servers, and none are started for a script." in trained.last_words
    assert "shoal train RECIPE" in trained.last_words and "Traceback" not in trained.errors


@pytest.mark.full
def test_a_script_that_trains_twice(start: Start, undisturbed: list[dict[str, Any]]) -> None:
    trained = start("twice").wait()
    assert trained.exit_code == 0, trained.errors
    assert told(trained.output) == undisturbed * 2


@pytest.mark.full
def test_scripts_that_do_not_train(start: Start) -> None:
    plain = start("plain", "--more", "words").wait()
    assert plain.exit_code == 0, plain.errors
    assert told(plain.output) == [{"sum": 3.0, "arguments": ["plain", "--more", "words"]}]
    nothing = start("nothing").wait()
    assert nothing.exit_code == 0, nothing.errors
    assert told(nothing.output) == [{"world": "2"}]


@pytest.mark.full
def test_ctrl_c_stops_a_loop_after_a_step(start: Start) -> None:
    training = start("slow-loop")
    training.wait_for_seats()
    assert wait_until(lambda: len(told(output_of(training))) >= 2, 20.0)
    training.command.send_signal(signal.SIGINT)
    trained = training.wait()
    assert trained.exit_code == 130, trained.errors
    assert 2 <= len([line for line in told(trained.output) if "step" in line]) < 8


def run_alone(script: str, words: list[str]) -> None:
    """In a fork of the warm process: the script, as a launcher that set the environment would."""
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def test_a_rank_that_does_not_come_is_named(pool: Pool, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = pool.start(
        run_alone,
        SCRIPT,
        ["own-loop"],
        environment={**place, "SHOAL_FORM_TIMEOUT_S": "1"},
        output=tmp_path / "output",
        errors=tmp_path / "errors",
        directory=tmp_path,
    )
    assert command.wait() == 1
    last = (tmp_path / "errors").read_text().strip().splitlines()[-1]
    assert "The group of 2 ranks did not form within 1 s: rank 1 did not come." in last


def test_a_script_that_is_told_to_end_saves_and_goes_on(pool: Pool, tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = []
    for number, code in enumerate((75, 0)):
        output = tmp_path / f"output-{number}"
        command = pool.start(
            run_alone,
            SCRIPT,
            ["saves"],
            output=output,
            errors=tmp_path / f"errors-{number}",
            directory=tmp_path,
        )
        if code:
            assert wait_until(
                lambda at=output: at.exists() and len(told(at.read_text())) >= 2, 20.0
            )
            command.send_signal(signal.SIGTERM)
        assert command.wait() == code, (tmp_path / f"errors-{number}").read_text()
        steps += told(output.read_text())
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert any((tmp_path / "kept").iterdir())


@pytest.mark.full
def test_a_script_is_run_again_in_its_directory(start: Start, tmp_path: Path) -> None:
    """By one command, killed before there was anything to go on from."""
    again = {"options": ("--resume",), "run_dir": tmp_path / "run", "ranks": 1}
    training = start("saves", **again)
    out = tmp_path / "run.out"
    assert wait_until(lambda: out.exists() and len(told(out.read_text())) >= 2, 40.0)
    training.command.send_signal(signal.SIGKILL)
    training.wait()
    refused = start("saves", run_dir=tmp_path / "run").wait()
    assert refused.exit_code == 2 and "Go on with it by --resume" in refused.last_words
    out.unlink()
    trained = start("saves", **again).wait()
    assert trained.exit_code == 0 and "begins at step 0" in trained.errors, trained.errors
    assert [step["step"] for step in told(trained.output)] == list(range(1, 9))
    out.unlink()
    done = start("saves", **again).wait()
    assert done.exit_code == 0 and told(done.output) == [], "what was said before is not said again"


def torchrun(directory: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, *words],
        cwd=directory,
        # It leaves its logs among the temporary files.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory), **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_torchrun_gives_the_same_numbers(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    done = torchrun(tmp_path, "own-loop")
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == undisturbed


@pytest.mark.full
def test_under_torchrun_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "lacks-a-rank", SHOAL_FORM_TIMEOUT_S="1")
    assert done.returncode != 0
    assert "did not form within 1 s: rank 1 did not come" in done.stderr


@pytest.mark.full
def test_under_torchrun_an_early_end_is_a_success(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "ends", "break")
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [{"steps": 3, "stopped": False}]
    (tmp_path / "kept").rename(tmp_path / "kept-before")
    done = torchrun(tmp_path, "ends", "break-on-one")
    assert done.returncode == 1
    assert "Rank 1 left its loop after step 3, and rank 0 goes on to step 4." in done.stderr


@pytest.mark.full
def test_under_torchrun_unlike_ranks_are_refused(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "unlike", "width")
    assert done.returncode == 1
    assert "shape of 0.weight is absent on rank 1 and float32 [4, 1] on rank 0." in done.stderr
