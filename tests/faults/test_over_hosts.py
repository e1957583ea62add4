"""Every plan over hosts that ssh reaches: the bits of one host, and no shared file system.

Hosts are network namespaces on one cable, and a command in the place of ssh enters them. The first
host's directory is hidden there, with the recipe, what it imports and reads, and the run directory.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.checkpoint.load import CheckpointReader
from shoal.cluster.invitation import INVITATION, KEYS
from shoal.faults import VARIABLE
from shoal.storage.store import DirectoryStore
from shoal.testing.ranks import Pool
from tests.faults.conftest import RECIPE
from tests.support.faults import Trained, Training, check_ledger, check_no_secret, secrets_of
from tests.support.hosts import (
    KEYS_NOTED,
    Host,
    NoNamespaces,
    before_others,
    overheard,
    run_in,
    several_hosts,
    throttle,
    write_ssh,
)
from tests.support.leaks import descendants

NUM_STEPS = 60
Begin = Callable[..., Training]

RECIPE_FILE = """
from pathlib import Path
from beside import changed

def mlp(pause: float = 0.0):
    print("loaded with", Path("notes/seed.txt").read_text().strip())
    return changed(pause, int(Path("notes/seed.txt").read_text()))

def wide():
    import tiny
    return tiny.wide()

def noisy():
    import dataclasses, tiny
    run = tiny.run_of(0.0)
    def loss(output, target):
        print("x" * 10_000, flush=True)
        return tiny.slow_loss(output, target, 0.0)
    return dataclasses.replace(run, loss=loss)
"""
BESIDE = """
import tiny

def changed(pause, seed):
    return tiny.run_of(pause, seed=seed)
"""


@pytest.fixture
def cable() -> Iterator[list[Host]]:
    with ExitStack() as made:
        try:
            yield made.enter_context(several_hosts(3))
        except NoNamespaces as why:
            pytest.skip(f"needs network namespaces: {why}")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first host's directory: a recipe that imports a module beside it and reads a file."""
    made = tmp_path / "first"
    (made / "notes").mkdir(parents=True)
    (made / "notes" / "seed.txt").write_text("0\n")
    (made / "recipe.py").write_text(RECIPE_FILE)
    (made / "beside.py").write_text(BESIDE)
    shutil.copy(RECIPE, made / "tiny.py")
    return made


@pytest.fixture
def begin(pool: Pool, tmp_path: Path, first: Path, cable: list[Host]) -> Begin:
    """Start `shoal train` on the first host, and others through ssh."""

    def start(
        plan: str | None,
        *options: str,
        on: str = "localhost,b",
        python: str = "",
        trusts: bool = True,
        hides: bool = True,
        include: tuple[str, ...] = ("notes",),
        recipe: str = "mlp",
        disk: str = "",
        spec: str = "",
        site: Path | None = None,
        faults: str = "",
        **settings: object,
    ) -> Training:
        hidden, others = first if hides else None, {"b": cable[1], "c": cable[2]}
        ssh = write_ssh(
            tmp_path / "ssh",
            others,
            hidden,
            is_apart=recipe == "wide",
            disk=(tmp_path / "disk", disk) if disk else None,
        )
        run_dir = first / f"run-{sum(1 for _ in first.glob('run-*.out'))}"
        words = ["train", spec or f"recipe.py:{recipe}", "--run-dir", str(run_dir), "--json"]
        words += ["--on", f"hosts:{on}", "--listen", cable[0].address, "--slots", "4", *options]
        words += [word for path in include for word in ("--include", path)]
        words += ["--plan", plan] if plan is not None else []
        words += ["--trust-network"] if trusts else []
        words += ["--python", python] if python else []
        for name, value in settings.items():
            words += ["--set", f"{name}={value}"]
        command = pool.start(
            run_in,
            cable[0].namespace,
            words,
            environment={
                VARIABLE: faults,
                "SHOAL_SSH": ssh,
                "SHOAL_TRUST_NETWORK": "",
                KEYS_NOTED: f"{run_dir}.keys",
                **({"PYTHONPATH": before_others(site)} if site else {}),
            },
            output=Path(f"{run_dir}.out"),
            errors=Path(f"{run_dir}.err"),
            directory=first,
        )
        return Training(command, run_dir)

    return start


def check_alike(trained: Trained, alone: Trained) -> None:
    assert trained.exit_code == 0, trained.errors
    assert [step["loss"] for step in trained.steps()] == [step["loss"] for step in alone.steps()]
    assert trained.model() == alone.model(), "the weights differ"


def test_hosts_without_a_shared_file_system_train_the_bits_of_one(
    begin: Begin, undisturbed_under
) -> None:
    """Recipe, modules and included files travel; logs come back; no key is in a file."""
    trained = begin("data=4").wait()
    check_alike(trained, undisturbed_under("data=4"))
    check_ledger(trained, NUM_STEPS)
    hosts = {event["rank"]: event["host"] for event in trained.events("seat")}
    assert hosts == {0: 0, 1: 0, 2: 1, 3: 1}
    assert "does not see the run directory" in trained.errors
    logs = {path.name: path.read_text() for path in (trained.run_dir / "logs").iterdir()}
    assert {"rank-000.log", "rank-003.log"} <= {*logs}
    assert sum("loaded with 0" in log for name, log in logs.items() if "recipe" in name) == 2
    for name in (INVITATION, KEYS, ".hosts", "servers"):
        assert not (trained.run_dir / name).exists()


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 pipeline=2 microbatches=3",
        "data=2 tensor=2",
        "data=4 zero=1",
        "data=4 zero=2",
        "data=2 zero=3 tensor=2",
        "data=4 local_steps=4",
        "data=4 sync=server servers=2",
        "data=4 sync=server servers=2 hosts=2",
        "data=4 local_steps=4 sync=server servers=2",
        "data=2 tensor=2 replicas=2 local_steps=4",
        "data=2 pipeline=2 microbatches=3 replicas=2 local_steps=4",
        "data=4 zero=2 replicas=2 local_steps=4",
        "data=2 tensor=2 replicas=2 local_steps=4 sync=server servers=2",
    ],
)
def test_every_plan(begin: Begin, undisturbed_under, plan: str) -> None:
    trained = begin(plan, trusts="server" not in plan or "tensor" in plan).wait()
    check_alike(trained, undisturbed_under(plan))


@pytest.mark.full
def test_a_slow_link_gets_a_codec(begin: Begin, cable: list[Host]) -> None:
    """And what was measured of the link is what it carries: 20 Mbit/s are 2.5 MB/s."""
    throttle(cable, megabits=20)
    trained = begin("data=2 codec=auto", "--slots", "1", recipe="wide").wait()
    assert trained.exit_code == 0, trained.errors
    (event,) = trained.events("measured-plan")
    assert 1e6 < event["link"]["bytes_per_s"] < 5e6
    assert event["codec"] != "none" and f"codec={event['codec']}" in trained.result["plan"]
    assert event["step_s"]["codec=none"] > 1.1 * event["step_s"][f"codec={event['codec']}"]


@pytest.mark.full
def test_three_hosts_of_which_the_cores_are_counted(begin: Begin) -> None:
    plan, on = "sync=server servers=2", "localhost,b,c"
    trained = begin(plan, "--slots", "2", on=on, trusts=False).wait()
    assert trained.exit_code == 0, trained.errors
    hosts = {event["rank"]: event["host"] for event in trained.events("seat")}
    assert hosts == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 0, 7: 1}


@pytest.mark.full
def test_checkpoints_go_to_a_place_that_all_see(
    begin: Begin, tmp_path: Path, undisturbed_under
) -> None:
    place = ("--checkpoints", str(tmp_path / "shared"))
    trained = begin("data=4", *place, save_every=20, steps=40).wait()
    assert trained.exit_code == 0, trained.errors
    assert "does not see" not in trained.errors
    assert sorted(path.name[-2:] for path in (tmp_path / "shared").iterdir()) == ["20", "40"]


@pytest.mark.full
def test_a_host_without_the_place_of_checkpoints_is_told_before_the_first_step(
    begin: Begin,
) -> None:
    trained = begin("data=4", save_every=5).wait()
    assert trained.exit_code == 2, trained.errors
    assert "host 1 (" in trained.last_words
    assert "does not see" in trained.last_words and "/checkpoints, where" in trained.last_words
    assert "--checkpoints URL-or-shared-directory" in trained.last_words
    assert not trained.run_dir.exists()


@pytest.mark.full
def test_a_full_disk_on_one_host(begin: Begin, undisturbed_under) -> None:
    """Full at the start, that host is refused; later, what it would print is lost, and no more."""
    refused = begin("data=2", "--slots", "1", disk="4k").wait()
    assert refused.exit_code == 2 and "host 1 (" in refused.last_words, refused.errors
    assert "No space left on device" in refused.last_words and not refused.run_dir.exists()
    trained = begin("data=2", "--slots", "1", disk="256k", recipe="noisy").wait()
    check_alike(trained, undisturbed_under("data=2"))
    logs = trained.run_dir / "logs"
    assert (
        (logs / "rank-001.log").stat().st_size < 256 << 10 < (logs / "rank-000.log").stat().st_size
    )


@pytest.mark.full
@pytest.mark.parametrize("rank", [1, 3], ids=["first host", "second host"])
def test_a_host_without_room_for_its_part_of_a_checkpoint(
    begin: Begin, tmp_path: Path, undisturbed_under, rank: int
) -> None:
    """Training goes on, what is half-written goes, and the next checkpoint is whole."""
    place = tmp_path / "shared"
    armed = f"checkpoint.after_chunk:full:member={rank}"
    options = ("--checkpoints", str(place), "--keep", "last=9")
    trained = begin("data=4 zero=2", *options, faults=armed, save_every=20).wait()
    check_alike(trained, undisturbed_under("data=4 zero=2"))
    check_ledger(trained, NUM_STEPS)
    failed = [event for event in trained.events("save-failed") if not event["echo"]]
    assert [event["step"] for event in failed] == [20]
    assert "No space left on device" in failed[0]["why"] and f"rank {rank} on" in failed[0]["why"]
    store = DirectoryStore(place)
    saved = [name[-2:] for name in store.names()]
    assert saved[-1] == "60" and "20" not in saved  # one may be left out while another is made
    for name in store.names():
        CheckpointReader(store, name).verify()
    assert {path.name for path in place.iterdir()} == {*store.names()}


def test_gradients_in_clear_text_are_refused_before_anything_starts(begin: Begin) -> None:
    trained = begin("data=4", trusts=False).wait()
    assert trained.exit_code == 2
    assert "gradients would cross the network in clear text" in trained.last_words
    assert "--trust-network" in trained.last_words and "sync=server" in trained.last_words
    assert not trained.run_dir.exists()


@pytest.mark.full
def test_what_is_wrong_with_a_host_is_said_in_a_sentence(
    begin: Begin, tmp_path: Path, first: Path
) -> None:
    killed = write_program(tmp_path / "killed", "kill -9 $$")
    (first / "large").write_bytes(bytes(65 << 20))
    for given, words in [
        ({"on": "localhost,nowhere"}, "nowhere: ssh cannot connect: ssh: Could not resolve"),
        ({"python": "/usr/bin/nopython"}, "b: there is no /usr/bin/nopython"),
        ({"python": killed}, "b: the agent was killed by SIGKILL"),
        ({"include": ("absent",)}, "--include absent: there is no such file or directory"),
        ({"include": ("large",)}, "have more than 64 MB"),
    ]:
        trained = begin("data=4", **given).wait()
        assert trained.exit_code == 2 and words in trained.errors, trained.errors
        assert not trained.run_dir.exists()
    trained = begin("data=4", include=()).wait()
    assert trained.exit_code == 2, trained.errors
    assert "host 1 (" in trained.last_words and "notes/seed.txt" in trained.last_words


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def agent_after(path: Path, lines: str) -> str:
    """A Python that executes these lines before it serves as the agent."""
    start = (
        f"{lines}\nimport sys\nfrom shoal.cli.main import run_here\nsys.exit(run_here(['agent']))"
    )
    return write_program(path, f'exec {sys.executable} -P -c "{start}"')


@pytest.mark.full
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("import shoal; shoal.__version__ = '9.9'", "and this host has 9.9. Install one version"),
        (
            "import importlib.metadata as m; own = m.version\n"
            "m.version = lambda name: '9.9' if name == 'torch' else own(name)",
            "on the first host and 9.9 on this one. All hosts of a run need",
        ),
        (
            "import platform; platform.python_version = lambda: '3.99.1'",
            "on the first host and 3.99.1 on this one. All hosts of a run need",
        ),
    ],
    ids=["shoal", "torch", "python"],
)
def test_another_version_on_one_host_is_named(
    begin: Begin, tmp_path: Path, lines: str, words: str
) -> None:
    trained = begin("data=4", python=agent_after(tmp_path / "other", lines)).wait()
    assert trained.exit_code == 2 and words in trained.errors, trained.errors
    assert not trained.run_dir.exists()


INSTALLED = """
import dataclasses, torch, tiny
from shoal.data import tensors

def made(pause: float = 0.0):
    inputs = torch.arange(480.0).reshape(120, 4)
    return dataclasses.replace(tiny.run_of(pause), data=tensors(inputs, inputs[:, :1]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("# none", ""), ""),
        (("pause: float = 0.0", "pause: float = 0.00"), "recipe_source is "),
        (("torch.arange(480.0)", "torch.arange(1.0, 481.0)"), "data_content is "),
    ],
    ids=["the same", "recipe", "data"],
)
def test_another_recipe_or_other_data_on_one_host_is_named(
    begin: Begin, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    """That of a package which each host has installed: nothing of it travels."""
    for name, text in [("a", INSTALLED), ("b", INSTALLED.replace(*change))]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "installed.py").write_text(text)
        shutil.copy(RECIPE, tmp_path / name / "tiny.py")
        (tmp_path / name / "sitecustomize.py").write_text(
            f"import sys\nsys.path.insert(0, {str(tmp_path / name)!r})\n"
        )
    lines = f"import sys; sys.path.insert(0, {str(tmp_path / 'b')!r})"
    trained = begin(
        "data=2",
        "--slots",
        "1",
        python=agent_after(tmp_path / "other", lines),
        spec="installed:made",
        site=tmp_path / "a",
    ).wait()
    if not words:
        assert trained.exit_code == 0, trained.errors
        return
    assert trained.exit_code == 2 and f"): {words}" in trained.errors, trained.errors
    assert "on the first host and" in trained.errors and not trained.run_dir.exists()


@pytest.mark.full
def test_keys_are_nowhere_to_be_found(begin: Begin, cable: list[Host], pool: Pool) -> None:
    """Neither on a command line, nor in an environment, a file, or what crosses the cable."""
    with overheard(cable[1]) as heard:
        training = begin("data=4 sync=server servers=2", trusts=False, pause=0.05)
        training.wait_for_step(5)
        secrets = secrets_of(training.run_dir)
        members = [pid for pid in descendants() if pid not in pool.pids()]
        assert len(members) > 7
        for pid in members:
            for name in ("cmdline", "environ"):
                content = Path(f"/proc/{pid}/{name}").read_bytes()
                assert not any(secret in content for secret in secrets), (pid, name)
        trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    check_no_secret(trained.run_dir)
    assert len(heard) > 100_000 and not any(secret in heard for secret in secrets)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("localhost", "names this machine alone"),
        ("b,b", "b is named twice"),
        ("", "name the hosts"),
        ("b,-oProxyCommand=x", "is not the name of a host"),
    ],
)
def test_names_that_are_none(start, on: str, words: str) -> None:
    trained = start(plan="data=2", options=("--on", f"hosts:{on}")).wait()
    assert trained.exit_code == 2 and words in trained.last_words
