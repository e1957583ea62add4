"""A rank that really hangs: the others wait in a collective, and the report says in which."""

import signal
import time

import pytest

from tests.support import faults
from tests.support.leaks import wait_until

MORE = {
    "data=3 zero=1": "",
    "data=3 zero=2": "",
    "data=3 zero=3": "all-gather",
    "tensor=2": "all-reduce",
    "pipeline=2": "receive from rank 1",
    "data=2 sync=server": "",
}


@pytest.mark.parametrize(
    ("plan", "op"),
    [("data=3 memory=apart", "")]
    + [pytest.param(*one, marks=pytest.mark.full) for one in MORE.items()],
)
def test_a_hang_names_the_collective_its_line_and_who_did_not_come(start, plan, op) -> None:
    training = start(recipe="sticking", plan=plan, where="model")
    assert wait_until(lambda: bool(faults.events(training.run_dir, "hang")), 40)
    for _ in range(2):
        training.command.send_signal(signal.SIGINT)
        time.sleep(0.3)
    trained = training.wait()
    hang = trained.events("hang")[-1]
    assert hang["missing"] == [1] and 0 in hang["waiting"] and 1 not in hang["waiting"], hang
    assert "never_end" in hang["lines"]["1"] and "tiny.py" in hang["lines"]["1"]
    assert op in hang["op"] and ".py:" in hang["at"] and hang["step"] >= 1, hang
    if plan == "data=3 memory=apart":
        assert hang["waiting"] == [0, 2] and "bucket 0 of" in hang["what"]
        assert "comm/" not in hang["at"]
    assert "rank 1 did not come; rank 1 is at never_end" in trained.errors
    log = (trained.run_dir / "logs" / "rank-000.log").read_text()
    assert "waits in a collective; the last ones:" in log and "NOT ENDED" in log
