"""Break a training run on purpose, and judge what comes of it.

`start` runs `shoal train` in a fork of the pool's warm process, with fault points armed
(`shoal.faults`) or to be hit by signals from outside. `Trained` holds what the run left, and the
`check_*` functions are the oracles: the same model bytes as an undisturbed run, each step recorded
once and in order, each sample once per epoch, survivors that kept their processes. That nothing is
left running is for `tests.support.leaks`.

Not for timing. Cost: about a second a run.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.checkpoint.load import CheckpointReader
from shoal.comm.wire import Keys
from shoal.elastic.control import send_request
from shoal.events.metrics_writer import last_recorded_step
from shoal.faults import VARIABLE
from shoal.storage.object_store import open_store
from shoal.storage.store import DirectoryStore
from shoal.testing.ranks import LIMIT_S, Command, Pool
from shoal.training.lineage import audit_run, read_record
from shoal.training.recipe import load_recipe
from shoal.training.resume import newest
from tests.support.hosts import KEYS_NOTED, Host, run_in, write_ssh
from tests.support.leaks import descendants, is_alive, wait_until


class Trained(NamedTuple):
    """A run that ended."""

    exit_code: int
    output: str
    errors: str
    run_dir: Path

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object that `--json` prints last."""
        found: dict[str, Any] = msgspec.json.decode(self.output.splitlines()[-1])
        return found

    @property
    def last_words(self) -> str:
        """The last line for people."""
        return self.errors.strip().splitlines()[-1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.run_dir, kind)

    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def model(self) -> bytes:
        return (self.run_dir / "model.safetensors").read_bytes()

    def pids(self) -> list[dict[int, int]]:
        """For each generation, the process in each seat."""
        seats: dict[int, dict[int, int]] = {}
        for event in self.events("seat"):
            seats.setdefault(event["generation"], {})[event["rank"]] = event["pid"]
        return [seats[generation] for generation in sorted(seats)]


class Training(NamedTuple):
    """A run under way."""

    command: Command
    run_dir: Path

    def wait(self, timeout_s: float = LIMIT_S) -> Trained:
        """Until it ends; if it does not, everything is ended and the wait fails."""
        try:
            code = self.command.wait(timeout_s)
        except TimeoutError as late:
            stacks = self._stacks()
            self.command.send_signal(signal.SIGKILL)
            said = _told(self.run_dir, ".err")
            raise AssertionError(
                f"{late}; it said: {said}\nIts ranks stand at:\n{stacks}"
            ) from late
        return Trained(code, _told(self.run_dir, ".out"), _told(self.run_dir, ".err"), self.run_dir)

    def _stacks(self) -> str:
        """Where every thread of every rank is: they write it to their logs when asked."""
        for event in events(self.run_dir, "started"):
            if is_alive(event["pid"]):
                os.kill(event["pid"], signal.SIGUSR1)
        time.sleep(1.0)
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in logs)

    def wait_for_step(self, step: int, timeout_s: float = LIMIT_S) -> None:
        """Until the record has this step; it is written several times a second."""
        path = self.run_dir / "metrics.jsonl"
        came = wait_until(
            lambda: last_recorded_step(path) >= step or not self.command.is_running(), timeout_s
        )
        assert came and last_recorded_step(path) >= step, (
            f"step {step} was not reached; it said: {_told(self.run_dir, '.err')}"
        )

    def wait_for_seats(self, generation: int = 0, timeout_s: float = LIMIT_S) -> dict[int, int]:
        """The process in each seat of a generation, once it has formed."""

        def formed() -> bool:
            kinds = (*events(self.run_dir, "formed"), *events(self.run_dir, "recovered"))
            return any(event["generation"] >= generation for event in kinds)

        assert wait_until(formed, timeout_s), f"generation {generation} did not form"
        seats = [e for e in events(self.run_dir, "seat") if e["generation"] == generation]
        return {event["rank"]: event["pid"] for event in seats}

    def processes(self) -> set[int]:
        """The supervisor and all that it started."""
        return {self.command.pid, *descendants(self.command.pid)}

    def signal_rank(self, rank: int, number: int) -> None:
        """To the process that now sits in this seat."""
        seats = [e["pid"] for e in events(self.run_dir, "seat") if e["rank"] == rank]
        os.kill(seats[-1], number)


def start(
    pool: Pool,
    recipe: str,
    run_dir: Path,
    *,
    plan: str,
    settings: Mapping[str, object] | None = None,
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    namespace: str = "",
    environment: Mapping[str, str] | None = None,
) -> Training:
    """Start `shoal train`, in a network namespace or here, with more variables in its environment;
    `faults` are of the form that `shoal.faults` reads."""
    words = ["train", recipe, "--plan", plan, "--run-dir", str(run_dir.resolve()), "--json"]
    for name, value in (settings or {}).items():
        words += ["--set", f"{name}={value}"]
    words += options
    command = pool.start(
        run_in,
        namespace,
        words,
        environment={VARIABLE: ",".join(faults), **(environment or {})},
        output=_beside(run_dir, ".out"),
        errors=_beside(run_dir, ".err"),
        directory=run_dir.parent,
    )
    return Training(command, run_dir)


def start_on_hosts(
    pool: Pool,
    recipe: str,
    run_dir: Path,
    hosts: Sequence[Host],
    *,
    plan: str,
    settings: Mapping[str, object] | None = None,
    options: Sequence[str] = (),
    slots: int = 1,
    ahead_s: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Training:
    """The same on several hosts, of which one that is silent for two seconds is lost. The first is
    the command's, the others are b, c and so on; their monotonic clocks may be ahead."""
    names = dict(zip("bcdef", hosts[1:], strict=False))
    ssh = write_ssh(run_dir.with_name("ssh"), names, ahead_s=ahead_s)
    words = ["--on", f"hosts:localhost,{','.join(names)}", "--listen", hosts[0].address]
    words += ["--trust-network", "--slots", str(slots), "--heartbeat-timeout", "2", *options]
    return start(
        pool,
        recipe,
        run_dir,
        plan=plan,
        settings=settings,
        options=words,
        namespace=hosts[0].namespace,
        environment={
            "SHOAL_SSH": ssh,
            KEYS_NOTED: str(_beside(run_dir, ".keys")),
            **(environment or {}),
        },
    )


def pids_on(training: Training, host: Host) -> list[int]:
    """The processes with a seat that are on a host, by its network."""
    network = os.stat(f"/run/netns/{host.namespace}").st_ino
    pids = [event["pid"] for event in events(training.run_dir, "seat")]
    return [pid for pid in pids if os.stat(f"/proc/{pid}/ns/net").st_ino == network]


def wait_for(training: Training, kind: str, count: int = 1) -> None:
    """Until the run has told of so many of these events."""
    came = wait_until(lambda: len(events(training.run_dir, kind)) >= count, LIMIT_S)
    assert came, f"no {kind} came; it said: {_told(training.run_dir, '.err')}"


def check_same(trained: Trained, undisturbed: Trained, every: int = 1) -> None:
    """Done, with the bits and the loss curve of the undisturbed run: of every so many steps, where
    replicas agree only then."""
    assert trained.exit_code == 0, trained.errors
    losses = [record["loss"] for record in undisturbed.steps()][every - 1 :: every]
    found = [record["loss"] for record in trained.steps()][every - 1 :: every]
    assert found == losses, "the losses differ"
    assert trained.model() == undisturbed.model(), "the weights differ"
    assert trained.result["loss"] == undisturbed.result["loss"]


def check_ledger(trained: Trained, num_steps: int, most_unmarked: int = 0) -> None:
    """Each step on record once and in order, made of the samples that the order gives it; so many
    may have no mark, since a run went on in the middle of a window of local steps."""
    record = read_record(trained.run_dir)
    found = audit_run(record, range(record.num_samples))
    assert not found.problems, found.problems
    assert (found.first_step, found.last_step) == (1, num_steps)
    assert found.num_marked + found.num_unmarked == num_steps
    assert found.num_unmarked <= most_unmarked, f"{found.num_unmarked} steps have no mark"
    assert found.most_often - found.least_often <= 1, "samples were not trained on equally often"


def check_over_hosts(trained: Trained, undisturbed: Trained, num_steps: int) -> None:
    """All that FAULTS asks of a run over hosts that ended well: the bits, the ledger, a cause for
    each host that was lost, good checkpoints, and no secret in what it wrote or printed."""
    check_same(trained, undisturbed)
    check_ledger(trained, num_steps)
    check_told(trained)
    check_checkpoints(trained.run_dir)
    check_no_secret(trained.run_dir)


def check_told(trained: Trained) -> None:
    """One line for each host that was lost: which, after which step, how, and what was done."""
    assert "Traceback" not in trained.errors
    lines = trained.errors.splitlines()
    for event in trained.events("host-lost"):
        words = f"{event['how']}, after step {event['step']}: {event['then']}"
        assert f"host {event['host']} (" in words and event["then"], words
        assert sum(words in line for line in lines) == 1, (words, trained.errors)


def check_checkpoints(run_dir: Path) -> None:
    """Each one verifies, among them the newest; nothing half-written is beside them."""
    store = DirectoryStore(run_dir / "checkpoints")
    assert store.names(), "there is no checkpoint"
    for name in store.names():
        CheckpointReader(store, name).verify()
    assert {*os.listdir(store.path)} == {*store.names()}, "something half-written remained"


def check_no_secret(run_dir: Path) -> None:
    """Neither in the files of a run that `start_on_hosts` began nor in what it printed."""
    for file in [*run_dir.rglob("*"), _beside(run_dir, ".err"), _beside(run_dir, ".out")]:
        if file.is_file():
            content = file.read_bytes()
            assert not any(secret in content for secret in secrets_of(run_dir)), file


def secrets_of(run_dir: Path) -> list[bytes]:
    """The secret halves of the keys of such a run."""
    keys = msgspec.json.decode(_beside(run_dir, ".keys").read_bytes(), type=Keys)
    return [keys.server_secret.encode(), keys.client_secret.encode()]


def check_left_out(
    trained: Trained, recipe: str, settings: Mapping[str, object], num_steps: int
) -> None:
    """Each step was made of the samples that the order gives it, without those in quarantine."""
    data = load_recipe(recipe, {name: str(value) for name, value in settings.items()}).data
    found = audit_run(read_record(trained.run_dir), data)
    assert not found.problems, found.problems
    assert found.num_left_out > 0
    assert (found.last_step, found.num_marked) == (num_steps, num_steps)


def check_survivors(trained: Trained, replaced: Sequence[int]) -> None:
    """Between two generations, only the replaced seats changed hands: `replaced` in order."""
    seats = trained.pids()
    changed = [
        rank
        for before, after in pairwise(seats)
        for rank in sorted(after)
        if before[rank] != after[rank]
    ]
    assert sorted(changed) == sorted(replaced), f"seats that changed hands: {changed}"


def check_recovered(trained: Trained, causes: Mapping[int, str]) -> None:
    """One event for each replaced seat, with rank, step, generation and cause."""
    told: dict[int, str] = {}
    for event in trained.events("recovered"):
        assert {"generation", "rank", "cause", "step", "ms"} <= event.keys()
        told[event["rank"]] = event["cause"]
    assert told.keys() == causes.keys(), told
    for rank, words in causes.items():
        assert words in told[rank], told


def resize(training: Training, size: str) -> dict[str, Any]:
    """Ask for another size, which is not refused."""
    answer = send_request(training.run_dir, resize=size)
    assert "refused" not in answer, answer
    return answer


def resize_while_one_is_killed(
    training: Training, sizes: Sequence[str], draws: random.Random, within_s: float
) -> list[dict[str, Any]]:
    """Ask for these sizes in any order, while any process of the run is killed; all answers."""

    def kill() -> None:
        time.sleep(wait_s)
        started = [event["pid"] for event in events(training.run_dir, "started")]
        with suppress(ProcessLookupError):  # it has left
            os.kill(started[int(which * len(started))], signal.SIGKILL)

    wait_s, which = draws.uniform(0.0, within_s), draws.random()
    killer = threading.Thread(target=kill)
    killer.start()
    answers = []
    for size in draws.sample(sizes, len(sizes)):
        answers.append(send_request(training.run_dir, resize=size))
        print(size, answers[-1])
    killer.join()
    return answers


def check_answers(trained: Trained, answers: Sequence[Mapping[str, Any]]) -> None:
    """The run had the sizes that it said, one after another; others it refused with a reason."""
    done = [answer["plan"] for answer in answers if "plan" in answer]
    assert [event["plan"] for event in trained.events("resized")] == done
    for answer in answers:
        why = answer.get("refused", "already")
        assert "already" in why or "a newcomer" in why, answer


def check_sizes(trained: Trained, plans: Sequence[str], num_steps: int) -> None:
    """It ended well in the last of these plans, after all others, and nothing is left of them."""
    assert trained.exit_code == 0, trained.errors
    assert [event["plan"] for event in trained.events("resized")] == plans
    assert [record["step"] for record in trained.steps()] == list(range(1, num_steps + 1))
    assert trained.result["plan"] == plans[-1]
    last = newest(open_store(trained.run_dir / "checkpoints"))
    assert last is not None and last.origin.plan == plans[-1]
    assert not (trained.run_dir / "control").exists()
    assert not list((trained.run_dir / "servers").glob("*")), "a journal was left"


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / "events.jsonl") if event["event"] == kind]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; a line being written is left out."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line) for line in whole.splitlines()]


def _beside(run_dir: Path, suffix: str) -> Path:
    return run_dir.with_name(run_dir.name + suffix)


def _told(run_dir: Path, suffix: str) -> str:
    return _beside(run_dir, suffix).read_text(errors="replace")
