"""`shoal simulate` on the command line: words, JSON, a picture, a sweep, and input that is bad."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool
from tests.support.faults import Trained

TINY = str(Path(__file__).with_name("tiny.py"))
CLUSTER = """
failures_per_month = 90
[inside]
latency = "10us"
bandwidth = "10 GB/s"
[between]
latency = "50us"
bandwidth = "10 Gbit/s"
[[hosts]]
count = 4
devices = 2
memory = "8GB"
speed = "50 Gflop/s"
"""


def shoal_simulate(pool: Pool, directory: Path, *words: str) -> Trained:
    (directory / "four.toml").write_text(CLUSTER)
    output, errors = directory / "output", directory / "errors"
    given = ["simulate", *words]
    command = pool.start(run_here, given, output=output, errors=errors, directory=directory)
    return Trained(command.wait(), output.read_text(), errors.read_text(), directory / "runs")


def test_object_with_a_sweep_and_a_picture(pool: Pool, tmp_path: Path) -> None:
    words = (f"{TINY}:line", "--plan", "data=4 pieces=8", "--cluster", "four.toml", "--hours", "24")
    words += ("--set", "save_every=4", "--slow", "3=2", "--jitter", "0.1", "--sweep", "data=1..8")
    done = shoal_simulate(pool, tmp_path, *words, "--svg", "run.svg", "--json")
    assert done.exit_code == 0, done.errors
    found = msgspec.json.decode(done.output)
    for name in ("step_s", "goodput", "bubble", "waiting", "bytes_sent", "failures"):
        assert found[name] >= 0, name
    assert found["failures"] > 0 and 0 < found["goodput"] < 1
    assert sum(found["rounds"]) == 8, "of as many replicas as there are at the end"
    curve = {(point["scaling"], point["size"]): point for point in found["curve"]}
    assert {size for _, size in curve} == {1, 2, 4, 8}
    assert curve["weak", 8]["batch_size"] == 8 * curve["strong", 1]["batch_size"]
    assert curve["strong", 1]["efficiency"] == 1
    assert {effect["setting"] for effect in found["effects"]} >= {"save_every", "spares"}
    texts = ElementTree.parse(tmp_path / "run.svg").iter("{http://www.w3.org/2000/svg}text")
    shown = {text.text for text in texts}
    assert {"One step", "Goodput over time", "Efficiency by data", "strong scaling"} <= shown


def test_words_for_people(pool: Pool, tmp_path: Path) -> None:
    words = (f"{TINY}:line", "--plan", "data=2", "--cluster", "cores-2", "--failures", "0")
    done = shoal_simulate(pool, tmp_path, *words)
    assert done.exit_code == 0, done.errors
    for word in ("under 'data=2 pieces=2' on 2 cores: 2 ranks", "goodput", "100.0%", "none"):
        assert word in done.output


BAD = {
    "cluster": (["--cluster", "nowhere.toml"], "nowhere.toml cannot be read"),
    "hours": (["--hours", "0"], "0 hours is no time"),
    "sweep": (["--sweep", "data=8-64"], "is no sweep"),
    "axis": (["--sweep", "zero=1..3"], "cannot be swept"),
    "small": (["--plan", "data=8", "--set", "batch_size=8"], "has 2 devices"),
    "plan": (["--plan", "dta=2"], "no key 'dta'"),
    "rank": (["--slow", "7=2"], "no rank 7"),
    "slow": (["--slow", "one"], "is not NUMBER=TIMES"),
    "hosts": (["--spare-hosts", "3"], "fewer spare hosts"),
    "store": (["--store", "much"], "is no amount"),
}


@pytest.mark.quick("hours", "axis", "plan", "slow", "hosts")
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_in_a_sentence(pool: Pool, tmp_path: Path, what: str) -> None:
    words, expected = BAD[what]
    given = [*words, *(() if "--plan" in words else ("--plan", "data=2"))]
    given += [] if "--cluster" in words else ["--cluster", "cores-2"]
    done = shoal_simulate(pool, tmp_path, f"{TINY}:line", *given)
    assert done.exit_code == 2, done.output + done.errors
    assert expected in done.errors and "Traceback" not in done.errors
