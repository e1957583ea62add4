"""A run that was stopped, killed or cut short goes on from its newest good checkpoint."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import MANIFEST, seal
from shoal.errors import RUN_AGAIN
from shoal.storage.run_dir import lock_directory
from shoal.storage.store import SEAL, DirectoryStore
from shoal.testing.ranks import Pool
from tests.faults.conftest import SAVE_POINTS, checkpoints
from tests.support import faults
from tests.support.faults import Trained, Training, check_ledger, check_same
from tests.support.leaks import is_alive, wait_until

RECIPE = str(Path(__file__).with_name("tiny.py"))
NUM_STEPS = 60
EMPTY = {"dtype": "F32", "shape": [0], "chunks": []}
EVERY = 10
QUICK = ((1, 1), (2, 0), (4, 0))  # point and member


@pytest.fixture
def train(pool: Pool, tmp_path: Path):
    """Start the tiny run, again and again, in one run directory."""

    def begin(
        *armed: str, plan: str = "data=3", resume: bool = False, keep: int = 3, **settings
    ) -> Training:
        options = ("--keep", f"last={keep}", *(("--resume",) if resume else ()))
        if not resume:
            settings = {"save_every": EVERY, **settings}
        return faults.start(
            pool,
            f"{RECIPE}:mlp",
            tmp_path / "run",
            plan=plan,
            settings=settings,
            faults=armed,
            options=options,
        )

    return begin


def test_saving_does_not_change_what_is_trained(train, undisturbed: Trained) -> None:
    trained = train(pause=0).wait()
    check_same(trained, undisturbed)
    saved = checkpoints(trained.run_dir)
    assert saved[-1] == trained.result["checkpoint"] == NUM_STEPS
    assert saved == [event["step"] for event in trained.events("saved")][-3:]


@pytest.mark.full
def test_three_resumes_at_odd_steps(train, undisturbed: Trained) -> None:
    done = 0
    for number in range(3):
        training = train(pause=0.02, resume=number > 0)
        training.wait_for_step(done + 1)
        training.command.send_signal(signal.SIGTERM)
        trained = training.wait()
        assert trained.exit_code == RUN_AGAIN, trained.errors
        assert done < len(trained.steps()) == trained.result["checkpoint"] < NUM_STEPS
        assert "--resume" in trained.last_words
        done = len(trained.steps())
    trained = train(pause=0.02, resume=True).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=1",
        *(
            pytest.param(plan, marks=pytest.mark.full)
            for plan in ("data=1", "data=3", "pipeline=2")
        ),
    ],
)
def test_it_goes_on_under_another_plan(train, plan: str) -> None:
    """Plans that sum in one order, so the bits are those of a run that never changed."""
    training = train(pause=0.02, plan=f"{plan} pieces=4", steps=24)
    training.wait_for_step(9)
    training.command.send_signal(signal.SIGINT)
    assert training.wait().exit_code == RUN_AGAIN
    trained = train(plan="data=2 pieces=4", pause=0.02, resume=True, steps=24).wait()
    check_ledger(trained, 24)
    losses, model = [record["loss"] for record in trained.steps()], trained.model()
    shutil.rmtree(trained.run_dir)
    whole = train(plan="data=2 pieces=4", pause=0, steps=24).wait()
    assert [record["loss"] for record in whole.steps()] == losses
    assert whole.model() == model


def test_killing_everything_loses_only_what_was_not_saved(train, undisturbed: Trained) -> None:
    training = train(pause=0.02)
    training.wait_for_step(25)
    processes = training.processes()
    training.command.send_signal(signal.SIGKILL)
    training.wait()
    assert wait_until(lambda: not any(map(is_alive, processes)), 10)
    trained = train(pause=0.02, resume=True).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)


def test_all_ranks_lost_at_once_go_on_from_the_checkpoint(train, undisturbed: Trained) -> None:
    training = train(pause=0.02)
    training.wait_for_step(25)
    for rank in range(3):
        training.signal_rank(rank, signal.SIGKILL)
    trained = training.wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    assert trained.result["steps_again"] < EVERY + 10


@pytest.mark.quick("checkpoint.after_chunk-1", "checkpoint.committed-0")
@pytest.mark.parametrize(
    ("point", "member"),
    [
        pytest.param(point, member, marks=[] if (i, member) in QUICK else [pytest.mark.full])
        for i, point in enumerate(SAVE_POINTS)
        for member in ((0, 1) if point not in SAVE_POINTS[3:] else (0,))
    ],
)
def test_a_kill_during_a_save(train, undisturbed: Trained, point: str, member: int) -> None:
    trained = train(f"{point}:kill:member={member}").wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    assert checkpoints(trained.run_dir)[-1] == NUM_STEPS


@pytest.mark.quick("checkpoint.begun-0")
@pytest.mark.parametrize(
    ("point", "member"),
    [
        pytest.param(
            point, member, marks=[] if (i, member) in ((0, 0), (3, 0)) else [pytest.mark.full]
        )
        for i, point in enumerate(SAVE_POINTS[:4])
        for member in ((0, 1) if i < 3 else (0,))  # rank 0 alone commits
    ],
)
def test_a_full_disk_costs_a_checkpoint_and_no_step(
    train, undisturbed: Trained, point: str, member: int
) -> None:
    trained = train(f"{point}:full:member={member}").wait()
    check_same(trained, undisturbed)
    failed = trained.events("save-failed")
    assert any("No space left" in event["why"] for event in failed)
    assert failed[0]["step"] not in checkpoints(trained.run_dir)
    assert checkpoints(trained.run_dir)[-1] == NUM_STEPS


def test_a_bad_checkpoint_is_passed_over(train, undisturbed: Trained) -> None:
    training = train(pause=0.02)
    training.wait_for_step(45)
    training.command.send_signal(signal.SIGTERM)
    stopped = training.wait()
    names = DirectoryStore(stopped.run_dir / "checkpoints").names()
    _flip(stopped.run_dir / "checkpoints" / names[-1] / "rank-00001.safetensors")
    (stopped.run_dir / "checkpoints" / names[-2] / "manifest.json").unlink()
    trained = train(pause=0.02, resume=True).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    refused = {event["name"]: event["why"] for event in trained.events("checkpoint-refused")}
    assert "rank-00001.safetensors" in refused[names[-1]]
    assert "manifest.json is missing" in refused[names[-2]]
    assert names[-1] in trained.errors and "passed over" in trained.errors
    (resumed,) = trained.events("resumed")
    assert resumed["name"] == names[-3] and resumed["plan"] == "data=3 pieces=3"
    told = trained.errors.splitlines()
    (at,) = [i for i, line in enumerate(told) if line.startswith("going on from step")]
    assert told[at].startswith(f"going on from step {int(names[-3][5:])}, saved under data=3")
    assert all("passed over" in line for line in told[at - 2 : at])


@pytest.mark.full
@pytest.mark.parametrize("damaged", [pytest.param(0, marks=pytest.mark.full), 1])
def test_what_one_rank_finds_damaged_all_ranks_pass_over(
    train, undisturbed: Trained, damaged: int
) -> None:
    """A server's state is read by one rank, and the others may find nothing wrong."""
    plan = "data=3 sync=server servers=2"
    trained = train(plan=plan).wait()
    _flip(trained.run_dir / "checkpoints" / "step-00000060" / f"rank-{damaged:05}.safetensors")
    again = train(plan=plan, resume=True).wait()
    check_same(again, undisturbed)
    (refused,) = again.events("checkpoint-refused")
    assert f"rank-{damaged:05}.safetensors: the bytes of" in refused["why"]
    assert [event["step"] for event in again.events("resumed")] == [50]


def test_one_command_is_given_again_until_the_run_is_done(train, undisturbed: Trained) -> None:
    """As schedulers do: nothing is there, then no checkpoint is, and at last nothing is to do."""
    training = train(resume=True, pause=0.02)
    training.wait_for_step(3)
    training.command.send_signal(signal.SIGKILL)
    killed = training.wait()
    assert "nothing to go on from" in killed.errors and "begins at step 0" in killed.errors
    assert not (killed.run_dir / "checkpoints").exists()
    plain = train(pause=0.02).wait()
    assert plain.exit_code == 2 and "Go on with it by --resume" in plain.last_words
    trained = train(resume=True, pause=0.02).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    assert trained.events("begun") and "begins at step 0" in trained.errors
    done = train(resume=True, pause=0.02).wait()
    assert done.exit_code == 0 and "were done already" in done.last_words
    assert done.model() == undisturbed.model()
    assert done.result["loss"] == undisturbed.result["loss"]


@pytest.mark.full
def test_a_run_that_was_killed_while_it_was_prepared_can_begin(train, tmp_path: Path) -> None:
    """It left logs, and an owner that is gone."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "recipe.log").write_text("")
    (tmp_path / "run" / "owner").write_text("process 1 on elsewhere")
    trained = train(resume=True, steps=3).wait()
    assert trained.exit_code == 0 and len(trained.steps()) == 3, trained.errors


@pytest.mark.parametrize(
    "plan",
    [
        "data=3",
        *(
            pytest.param(plan, marks=pytest.mark.full)
            for plan in ("data=2 zero=1", "data=2 zero=3", "pipeline=2", "data=2 sync=server")
        ),
    ],
)
def test_a_run_whose_checkpoints_are_all_damaged_begins_anew(train, plan: str) -> None:
    """From the first weights, whatever was read before the damage showed."""
    training = train(pause=0.02, plan=plan)
    training.wait_for_step(5)
    training.command.send_signal(signal.SIGTERM)
    stopped = training.wait()
    assert stopped.exit_code == RUN_AGAIN, stopped.errors
    folder = stopped.run_dir / "checkpoints"
    for name in DirectoryStore(folder).names():
        _flip(folder / name / "rank-00000.safetensors")
    trained = train(pause=0.02, plan=plan, resume=True, steps=12).wait()
    assert trained.exit_code == 0, trained.errors
    assert "rank-00000.safetensors" in trained.errors and "going on from" not in trained.errors
    assert f"no checkpoint in {folder} is good: the run starts again at step 0" in trained.errors
    check_ledger(trained, 12)
    model = trained.model()
    shutil.rmtree(trained.run_dir)
    assert train(pause=0, plan=plan, steps=12).wait().model() == model


@pytest.mark.full
def test_a_run_whose_manifests_are_all_damaged_begins_anew(train) -> None:
    stopped = train(pause=0, steps=4).wait()
    folder = stopped.run_dir / "checkpoints"
    for name in DirectoryStore(folder).names():
        (folder / name / "manifest.json").write_text("{")
    trained = train(pause=0, resume=True, steps=8).wait()
    assert trained.exit_code == 0, trained.errors
    assert "the run starts again at step 0" in trained.errors
    check_ledger(trained, 8)


@pytest.mark.full
def test_checkpoints_that_may_be_good_are_not_begun_over(train, tmp_path: Path) -> None:
    """Another model's, or a link's, or of a key that is not the one: what they hold is no loss."""
    assert train(pause=0, steps=4).wait().exit_code == 0
    store = tmp_path / "run" / "checkpoints"
    path = store / "step-00000004"
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["tensors"].append({**EMPTY, "name": "model.gone"})
    content = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(content)
    (path / SEAL).write_bytes(seal(content))
    strange = train(pause=0, steps=4, resume=True).wait()
    assert strange.exit_code == 2 and "holds model.gone, which" in strange.last_words
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    linked = train(pause=0, steps=4, resume=True).wait()
    assert linked.exit_code == 2 and "is a link" in linked.last_words


@pytest.mark.full
def test_a_run_without_a_checkpoint_begins_anew_as_it_began(train, tmp_path: Path) -> None:
    training = train(pause=0.02, save_every=1000)
    training.wait_for_step(2)
    training.command.send_signal(signal.SIGKILL)
    training.wait()
    for change, told in (
        ({"batch_size": 6}, "batch_size was 12 and is 6 now"),
        ({"pause": 1}, "--set pause=1: it was 0.02 when the run began"),
    ):
        refused = train(resume=True, **{"pause": 0.02, **change}).wait()
        assert refused.exit_code == 2 and told in refused.last_words
    described = tmp_path / "run" / "run.json"
    content = described.read_text()
    described.write_text(content.replace("tiny.py:mlp", "tiny.py:wide"))
    other = train(resume=True).wait()
    assert other.exit_code == 2 and "tiny.py:wide, not " in other.last_words
    described.write_text('{"script": "own.py"}')
    script = train(resume=True).wait()
    assert script.exit_code == 2 and "is not of a `shoal train`" in script.last_words
    described.write_text(content)
    trained = train(resume=True, pause=0.02).wait()
    assert trained.exit_code == 0 and len(trained.steps()) == NUM_STEPS


@pytest.mark.full
def test_a_new_directory_goes_on_from_checkpoints_elsewhere(pool: Pool, tmp_path: Path) -> None:
    """As on another machine, whose disk has nothing of the run."""
    there = ("--checkpoints", str(tmp_path / "there"), "--resume")

    def run(name: str, recipe: str = "mlp", **settings: object) -> Trained:
        return faults.start(
            pool,
            f"{RECIPE}:{recipe}",
            tmp_path / name,
            plan="data=2",
            settings={"pause": 0, **settings},
            options=there,
        ).wait()

    assert run("first", steps=4).exit_code == 0
    second = run("second", steps=8)
    assert second.exit_code == 0 and "going on from step 4" in second.errors, second.errors
    assert [record["step"] for record in second.steps()] == [5, 6, 7, 8]
    other = run("third", recipe="stateless", steps=9)
    assert other.exit_code == 2 and "tiny.py:mlp, not " in other.last_words
    changed = run("third", steps=9, batch_size=6)
    assert changed.exit_code == 2 and "batch_size was 12 and is 6 now" in changed.last_words


@pytest.mark.full
def test_checkpoints_are_not_left_behind_by_chance(train, tmp_path: Path, pool: Pool) -> None:
    assert train(pause=0, steps=4).wait().exit_code == 0
    options = ("--resume", "--checkpoints", str(tmp_path / "elsewhere"))
    settings = {"steps": 8, "pause": 0}
    refused = faults.start(
        pool, f"{RECIPE}:mlp", tmp_path / "run", plan="data=3", settings=settings, options=options
    ).wait()
    assert refused.exit_code == 2
    assert f"keeps its own in {tmp_path / 'run' / 'checkpoints'}" in refused.last_words


def test_what_may_not_change(train) -> None:
    trained = train(steps=20).wait()
    assert trained.exit_code == 0, trained.errors
    again = train(resume=True, steps=20, batch_size=6).wait()
    assert again.exit_code == 2 and "batch_size was 12 and is 6 now" in again.last_words
    slower = train(resume=True, steps=20, pause=1).wait()
    assert slower.exit_code == 2 and "--set pause=1: it was not set" in slower.last_words
    done = train(resume=True, steps=20).wait()
    assert done.exit_code == 0 and "were done already" in done.last_words
    longer = train(resume=True, steps=30).wait()
    assert longer.exit_code == 0 and len(longer.steps()) == 30


def test_an_end_that_was_not_saved_is_no_success(train, tmp_path: Path) -> None:
    trained = train("checkpoint.begun:full:member=1", steps=8).wait()
    assert trained.exit_code == trained.result["exit_code"] == 1
    assert "Step 8, the last, could not be saved: " in trained.last_words
    assert "No space left on device" in trained.result["not_saved"]
    assert trained.result["checkpoint"] is None and trained.result["steps"] == 8
    assert trained.result["model"] == str(tmp_path / "run" / "model.safetensors")
    assert trained.model() and checkpoints(trained.run_dir) == []
    shutil.rmtree(Path(trained.result["rescued"]).parent)


def test_a_model_that_does_not_fit_leaves_no_half_of_it(train) -> None:
    trained = train("model.written:full:member=0", steps=8).wait()
    assert trained.exit_code == 0 and checkpoints(trained.run_dir) == [8]
    assert not [name for name in os.listdir(trained.run_dir) if name.startswith("model")]
    assert trained.result["model"] is None and trained.result["not_saved"] is None
    told = "model: model.safetensors was not written: [Errno 28] No space left on device."
    assert told in trained.errors


def test_the_best_by_what_is_not_measured_is_refused(pool: Pool, tmp_path: Path) -> None:
    for recipe, metric, told in (
        ("evaluated", "los", "best=los: this run measures no such number. Did you mean 'loss'?"),
        ("mlp", "accuracy", "best=accuracy: this run measures no such number. Known: loss."),
    ):
        options = ("--keep", f"best={metric}")
        run_dir = tmp_path / recipe
        refused = faults.start(pool, f"{RECIPE}:{recipe}", run_dir, plan="data=2", options=options)
        ended = refused.wait()
        assert ended.exit_code == 2 and told in ended.last_words
        assert not run_dir.exists()  # nothing began


SPECTRAL = """
import torch
from torch import nn
from tests.faults.tiny import run_of

def net():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("phases", torch.ones(4, dtype=torch.complex128))

        def forward(self, inputs):
            return self.layer(inputs)

    return run_of(0.0, model=Net, steps=3)
"""


def test_what_no_checkpoint_can_hold_is_refused_before_it_is_trained(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "spectral.py").write_text(SPECTRAL)

    def run(*options: str, **settings: object) -> Trained:
        run_dir = tmp_path / f"run-{len(list(tmp_path.glob('*.out')))}"
        recipe = f"{tmp_path / 'spectral.py'}:net"
        return faults.start(
            pool, recipe, run_dir, plan="data=2", settings=settings, options=options
        ).wait()

    for trained, asked in (
        (run(save_every=2), "save_every=2"),
        (run("--checkpoints", str(tmp_path / "there")), "--checkpoints"),
    ):
        assert trained.exit_code == 2
        assert f"phases is complex128, and {asked} asks for it" in trained.last_words
        assert not trained.steps()
    trained = run()
    assert trained.exit_code == 0, trained.errors
    assert "no checkpoint will be made" in trained.errors and len(trained.steps()) == 3
    assert trained.result["checkpoint"] is trained.result["model"] is None
    assert "model.safetensors was not written: phases is complex128" in trained.errors


@pytest.mark.full
def test_a_bad_checkpoint_is_never_kept_in_place_of_a_good_one(train, tmp_path: Path) -> None:
    """One of an earlier life of the run, later than those that come, counts for nothing."""
    store = DirectoryStore(tmp_path / "run" / "checkpoints")
    # Slow enough for every save to end before the next is due: no step waits for one.
    assert train(steps=20, save_every=5, pause=0.05).wait().exit_code == 0
    _flip(store.path / "step-00000020" / "rank-00000.safetensors")
    shutil.copytree(store.path / "step-00000015", store.path / "precious")
    trained = train(steps=19, save_every=2, resume=True).wait()
    assert trained.exit_code == 0, trained.errors
    names = store.names()
    assert names == ["precious", *(f"step-{n:08d}" for n in (16, 18, 19, 20))]
    for name in names[1:4]:
        CheckpointReader(store, name).verify()


@pytest.mark.full
def test_a_run_goes_on_with_what_it_was_given(train, tmp_path: Path) -> None:
    assert train(steps=4, save_every=4, pause=0.05).wait().exit_code == 0
    trained = train(steps=14, resume=True).wait()
    saved = [event["step"] for event in trained.events("saved")]
    assert saved[-1] == 14 and 8 in saved, saved


@pytest.mark.full
def test_checkpoints_of_another_run_are_not_gone_on_from_by_chance(
    pool: Pool, tmp_path: Path
) -> None:
    there = tmp_path / "there"

    def run(name: str, steps: int, *options: str) -> Trained:
        settings = {"steps": steps}
        run_dir = tmp_path / name
        return faults.start(
            pool, f"{RECIPE}:mlp", run_dir, plan="data=2", settings=settings, options=options
        ).wait()

    first = run("first", 4, "--checkpoints", str(there))
    assert first.exit_code == 0 and DirectoryStore(there).names() == ["step-00000004"]
    second = run("second", 8, "--checkpoints", str(there))
    assert second.exit_code == 2 and "already holds checkpoints" in second.last_words
    with lock_directory(there):
        third = run("first", 8, "--resume")
    assert third.exit_code == 2 and "is in use by" in third.last_words


NONSENSE = {  # by the step of the checkpoint that is made so
    20: (lambda m: m.update(plain={}), "makes no sense"),
    15: (lambda m: m["progress"].update(step=-5), "step -5, which cannot be"),
    10: (
        lambda m: m["tensors"].append({**EMPTY, "name": "model.gone"}),
        "holds model.gone, which",
    ),
}


@pytest.mark.full
def test_sealed_nonsense_is_passed_over(train, tmp_path: Path) -> None:
    # Slow enough for every save to end before the next is due.
    assert train(steps=20, save_every=5, pause=0.05, keep=4).wait().exit_code == 0
    for step, (change, _) in NONSENSE.items():
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        manifest = json.loads((path / MANIFEST).read_text())
        change(manifest)
        content = json.dumps(manifest).encode()
        (path / MANIFEST).write_bytes(content)
        (path / SEAL).write_bytes(seal(content))
    trained = train(steps=22, resume=True, keep=4).wait()
    assert trained.exit_code == 0, trained.errors
    refused = {event["name"]: event["why"] for event in trained.events("checkpoint-refused")}
    for step, (_, words) in NONSENSE.items():
        assert words in refused[f"step-{step:08d}"]
    (resumed,) = trained.events("resumed")
    assert resumed["name"] == "step-00000005" and len(trained.steps()) == 22


def test_a_loss_scale_is_fp16s_alone(train, tmp_path: Path) -> None:
    """Not taken from fp32, which has none, and left behind where there is none."""
    store = DirectoryStore(tmp_path / "run" / "checkpoints")
    for steps, precision, value in ((4, "fp32", None), (8, "fp16", 65536.0), (12, "bf16", None)):
        plan = f"data=2 precision={precision}"
        trained = train(plan=plan, steps=steps, pause=0, resume=steps > 4).wait()
        assert trained.exit_code == 0, trained.errors
        progress = CheckpointReader(store, f"step-{steps:08d}").manifest.progress
        assert progress.loss_scale.get("value") == value


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
