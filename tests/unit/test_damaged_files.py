"""Whatever a file holds, it is read, or refused in a sentence: no traceback, no wait, no effect."""

import json
import os
import random
import socket
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import shoal
from shoal.checkpoint import manifest as manifests
from shoal.cli.main import run_here
from shoal.cluster.invitation import INVITATION, Invitation, read_invitation, write_invitation
from shoal.comm.wire import load_keys, make_keys, new_keys
from shoal.data import packing
from shoal.data.cache.host_memory import _Attachment
from shoal.data.cache.host_memory import _read as members_in
from shoal.data.ledger import mark
from shoal.data.orders import Shuffled, order_name
from shoal.data.shard_files import format as shard_format
from shoal.data.shard_files.reading import shards
from shoal.data.shard_files.shard_source import LostSample
from shoal.data.shard_files.writing import build
from shoal.data.transforms.quarantine import BadQuarantine, quarantine, read_entries
from shoal.data.transforms.statistics import load_statistics, statistics
from shoal.elastic.control import ControlRequest, ControlSocket
from shoal.errors import ShoalError, UsageError
from shoal.events.metrics_writer import MetricsWriter, last_recorded_step
from shoal.formats import dcp, huggingface, safetensors, state_dict
from shoal.formats.open_weights import open_import
from shoal.formats.weights import ForeignWeights, ModelWeights, stored_whole
from shoal.launch import outcome
from shoal.numerics.precision import _recall
from shoal.storage.run_dir import read_description
from shoal.storage.store import SEAL, DirectoryStore
from shoal.sync.server.journal import records_of, write_record
from shoal.training.lineage import audit_run, batches_of, missed_samples, read_record, select_new
from shoal.training.recipe import provenance
from shoal.training.resume import newest, plan_to_resume, refuse_changes
from tests.mutations import mutated
from tests.unit.checkpoint.made import NAME, make, tensors

QUICK, FULL = 20, 1500


class Case(NamedTuple):
    """Files of which one is changed at a time, and what is then done with them."""

    files: list[Path]
    read: Callable[[], object]
    reseal: Callable[[], None] = lambda: None  # so that a change is not found by its hash alone


Make = Callable[[Path], Case]
CASES: dict[str, Make] = {}


def case(make_case: Make) -> Make:
    CASES[make_case.__name__] = make_case
    return make_case


def verb(*words: str, codes: tuple[int, ...] = (0, 2)) -> Callable[[], None]:
    def run() -> None:
        assert (code := run_here(list(words))) in codes, f"exit code {code}"

    return run


# ---- runs


def made_run(folder: Path, name: str = "run", **more: Any) -> Path:
    """The directory of a run of three steps."""
    run = folder / name
    run.mkdir()
    values = {"batch_size": 4, "seed": 3, "end": "drop", "data_order": order_name(Shuffled(40), 3)}
    fields = {name: {"value": value, "from": "recipe"} for name, value in values.items()}
    described = {"recipe": "r.py:f", "settings": {"width": "3"}, "plan": "data=2", "run": fields}
    text = json.dumps({**described, "num_samples": 40, "keep": "last=2", **more})
    (run / "run.json").write_text(text)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    batches = batches_of(read_record(run), range(40))
    lines = [
        {"step": step + 1, "loss": 0.5, "samples": 4, "mark": mark(batches.at(step).ids)}
        for step in range(3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def record_files(run: Path) -> list[Path]:
    return [run / "run.json", run / "metrics.jsonl"]


@case
def audit(folder: Path) -> Case:
    run = made_run(folder)
    return Case(record_files(run), verb("data", "audit", str(run), codes=(0, 1, 2)))


@case
def audit_of_new_data(folder: Path) -> Case:
    first = made_run(folder, "first")
    more = {"new_data": str(first), "new_data_steps": 2, "new_data_missed": [1], "replay": 0.25}
    run = made_run(folder, "second", **more)
    audited = verb("data", "audit", str(run), codes=(0, 1, 2))
    return Case([*record_files(run), *record_files(first)], audited)


@case
def new_data(folder: Path) -> Case:
    run = made_run(folder)

    def read() -> None:
        record, data = read_record(run), range(60)
        select_new(data, record, 0.25, missed_samples(record, data))
        audit_run(record, data)

    return Case(record_files(run), read)


@case
def resumed(folder: Path) -> Case:
    run = made_run(folder)
    words = ("train", str(folder / "none.py:f"), "--resume", "--run-dir", str(run))
    return Case([run / "run.json"], verb(*words, codes=(2,)))


@case
def joined_without_invitation(folder: Path) -> Case:
    run = made_run(folder)
    return Case([run / "run.json"], verb("join", str(run), codes=(2,)))


@case
def description(folder: Path) -> Case:
    run = made_run(folder)
    return Case([run / "run.json"], lambda: read_description(run))


@case
def metrics(folder: Path) -> Case:
    path = made_run(folder) / "metrics.jsonl"

    def read() -> None:
        last_recorded_step(path)
        outcome._read(path)
        MetricsWriter(path, lambda: False).rewind(2)

    return Case([path], read)


@case
def invitation(folder: Path) -> Case:
    run = made_run(folder)
    write_invitation(Invitation("tcp://10.0.0.1:81", new_keys(), str(run)), run)

    def read() -> None:
        found = read_invitation(run)
        assert 0 < found.endpoint[1] < 2**16

    return Case([run / INVITATION], read)


@case
def keys(folder: Path) -> Case:
    make_keys(folder / "keys")
    return Case([folder / "keys"], lambda: load_keys(folder / "keys"))


# ---- checkpoints and weights


@case
def checkpoint(folder: Path) -> Case:
    make(folder / "run" / "checkpoints", tensors())
    one = folder / "run" / "checkpoints" / NAME
    out = folder / "out"

    def reseal() -> None:
        seal = manifests.seal((one / manifests.MANIFEST).read_bytes())
        (one / SEAL).write_bytes(seal)

    def read() -> None:
        for words in (
            ["list", str(folder / "run")],
            ["show", str(one)],
            ["verify", str(folder / "run")],
            ["diff", str(one), str(one)],
            ["prune", str(folder / "run"), "--keep", "last=1 best=loss", "--dry-run"],
            ["export", str(one), str(out), "--to", "safetensors"],
        ):
            verb("checkpoint", *words, codes=(0, 1, 2))()
            out.unlink(missing_ok=True)

    return Case([one / manifests.MANIFEST], read, reseal)


@case
def going_on(folder: Path) -> Case:
    """What a checkpoint says of its run, as `--resume` compares it."""
    make(folder, tensors())
    run = shoal.Run(
        model=lambda: torch.nn.Linear(1, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(torch.zeros(120, 1), torch.zeros(120, 1)),
        batch_size=4,
        steps=2,
    )
    own = {name: field["value"] for name, field in provenance(run, {}).items()}
    path = folder / NAME / manifests.MANIFEST
    manifest = msgspec.json.decode(path.read_bytes())
    manifest["origin"]["run"] = own
    path.write_bytes(msgspec.json.encode(manifest))

    def reseal() -> None:
        (folder / NAME / SEAL).write_bytes(manifests.seal(path.read_bytes()))

    def read() -> None:
        found = newest(DirectoryStore(folder))
        if found is None:
            raise UsageError("There is no good one, and the run begins anew.")
        refuse_changes(own, run, found.origin)
        plan_to_resume(run, None, None, found.origin)

    reseal()
    return Case([path], read, reseal)


def weights() -> ModelWeights:
    torch.manual_seed(0)
    found = {"a.weight": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2).bfloat16()}

    def held(tensor: torch.Tensor) -> Any:
        return stored_whole(tensor.dtype, tensor.shape, lambda: tensor)

    return ModelWeights(ForeignWeights({name: held(tensor) for name, tensor in found.items()}))


def imported(path: Path) -> Callable[[], None]:
    def read() -> None:
        found = open_import(path, "")
        for name in found:
            found.whole(name)

    return read


@case
def state_dict_file(folder: Path) -> Case:
    path = folder / "model.pt"
    state_dict.export_state_dict(weights(), path, {})
    return Case([path], imported(path))


@case
def saved_by_torch(folder: Path) -> Case:
    path = folder / "model.pt"
    nested = {"model": {"a": torch.randn(3), "b": [1, 2, "x"]}, "step": 3, "rate": 0.1}
    torch.save(nested, path)
    return Case([path], imported(path))


@case
def archive_with_odd_names(folder: Path) -> Case:
    """The names of an archive's records, and their bytes, as nobody writes them."""
    path, plan = folder / "model.pt", folder / "names.json"
    torch.save({"a": torch.randn(3), "b": {"c": torch.arange(4)}}, path)
    with zipfile.ZipFile(path) as archive:
        records = [[name, archive.read(name).hex()] for name in archive.namelist()]
    plan.write_text(json.dumps(records))

    def read() -> None:
        try:
            made = [(str(name), bytes.fromhex(content)) for name, content in _json(plan)]
            with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
                warnings.simplefilter("ignore")  # of names that come twice
                for name, content in made:
                    archive.writestr(zipfile.ZipInfo(name or "empty"), content)
        except (ValueError, TypeError, RecursionError):
            return  # a change that makes no archive
        imported(path)()

    return Case([plan], read)


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


@case
def safetensors_file(folder: Path) -> Case:
    path = folder / "model.safetensors"
    safetensors.export_safetensors(weights(), path)
    return Case([path], imported(path))


@case
def hugging_face(folder: Path) -> Case:
    huggingface.export_huggingface(weights(), folder / "model", shard_bytes=40)
    return Case(sorted((folder / "model").iterdir()), imported(folder / "model"))


@case
def dcp_directory(folder: Path) -> Case:
    dcp.export_dcp(weights(), folder / "model")
    return Case(sorted((folder / "model").iterdir()), imported(folder / "model"))


# ---- data


def shard_case(folder: Path, samples: list[Any], **options: Any) -> Case:
    build(samples, folder / "set", shard_bytes=200, **options)
    place = folder / "set"

    def reseal() -> None:
        content = (place / shard_format.INDEX).read_bytes()
        (place / shard_format.SEAL).write_bytes(shard_format.seal(content))

    def read() -> None:
        verb("data", "show", str(place), codes=(0, 1, 2))()
        verb("data", "verify", str(place), codes=(0, 1, 2))()
        found = shards(place)
        for index in range(min(len(found), 20)):
            found[index]

    return Case([place / shard_format.INDEX, place / "shard-00000.bin"], read, reseal)


@case
def shards_of_rows(folder: Path) -> Case:
    return shard_case(folder, [(float(i), i) for i in range(20)])


@case
def packed_shards(folder: Path) -> Case:
    samples = [({"text": "x" * i, "of": torch.ones(i)}, i) for i in range(12)]
    return shard_case(folder, samples, compress="zstd")


@case
def packed_sample(folder: Path) -> Case:
    path = folder / "sample"
    sample = ({"text": "abc", "of": torch.ones(3), 4: [1.5, None, b"x"]}, (1, True))
    path.write_bytes(packing.pack(sample))

    def read() -> None:
        try:
            packing.unpack(path.read_bytes())
        except packing.BadSample as bad:
            raise UsageError(str(bad)) from None

    return Case([path], read)


@case
def quarantine_file(folder: Path) -> Case:
    path = folder / "bad.jsonl"
    held = quarantine([(float(i), 0) for i in range(9)], path)
    for index in (2, 5):
        held.record(index, ValueError("odd"))

    def read() -> None:
        try:
            read_entries(path)
            quarantine([(float(i), 0) for i in range(9)], path).left_out()
        except BadQuarantine as bad:
            raise UsageError(str(bad)) from None

    return Case([path], read)


@case
def statistics_file(folder: Path) -> Case:
    found = statistics([(torch.randn(3), 0) for _ in range(9)], ["inputs"], quantiles=[0.5])
    found.save(folder / "statistics.json")
    return Case([folder / "statistics.json"], lambda: load_statistics(folder / "statistics.json"))


# ---- caches and what processes leave each other


@case
def list_of_members(folder: Path) -> Case:
    path = folder / "memory.json"
    path.write_bytes(msgspec.json.encode([_Attachment(1, 2), _Attachment(3, 4)]))

    def read() -> None:
        with path.open("rb") as file:
            members_in(file.fileno())

    return Case([path], read)


@case
def kept_probe(folder: Path) -> Case:
    path = folder / "bf16.json"
    path.write_text('{"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}')

    def read() -> None:
        found = _recall(path)
        assert not found or found == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}

    return Case([path], read)


@case
def journal(folder: Path) -> Case:
    path = folder / "log"
    with path.open("wb", buffering=0) as file:
        for number in range(3):
            write_record(file, b"header %d" % number, [torch.ones(number)])
    return Case([path], lambda: list(records_of(path)))


# ---- the tests


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.mktemp("cache")))


def check(case: Case, num_changes: int, seed: int) -> None:
    draw = random.Random(seed)
    before = {path: path.read_bytes() for path in case.files}
    case.read()
    num_refused = 0
    for number in range(num_changes):
        path = draw.choice(case.files)
        content = mutated(before[path], draw)
        path.write_bytes(content)
        case.reseal()
        try:
            case.read()
        except ShoalError as error:
            num_refused += 1
            wanted = 1 if isinstance(error, LostSample) else 2
            assert error.exit_code == wanted and str(error).strip(), error
        except BaseException as error:
            why = f"change {number} of seed {seed}: {path.name} as {content[:300]!r}"
            raise AssertionError(why) from error
        path.write_bytes(before[path])
        case.reseal()
    case.read()  # nothing was done to the others


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    check(CASES[name](tmp_path), QUICK, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_many_damaged_files(name: str, tmp_path: Path) -> None:
    check(CASES[name](tmp_path), FULL, seed=int.from_bytes(os.urandom(4)))


# ---- what is sent to a run, and what it answers


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlSocket]:
    (tmp_path / "run.json").write_text("{}")
    made = ControlSocket(tmp_path)
    yield made
    made.close()


def sent(
    folder: Path, control: ControlSocket, content: bytes
) -> tuple[list[ControlRequest], bytes]:
    """What a run takes for a request, and what it answers, when a stranger sends bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(30)
        line.connect(str(folder / "control"))
        line.sendall(content)
        line.shutdown(socket.SHUT_WR)
        asked = []
        while not asked and not (heard := _heard(line)):
            asked = [request for _, request in control.requests()]
        return asked, b"" if asked else heard


def _heard(line: socket.socket) -> bytes:
    line.settimeout(0.001)
    try:
        return line.recv(1 << 16)
    except TimeoutError:
        return b""


def check_control(folder: Path, control: ControlSocket, num_changes: int, seed: int) -> None:
    draw = random.Random(seed)
    good = b'{"resize":"data=3"}\n'
    for content in (b"[" * 60_000, b'{"resize":' * 9_000, b'{"resize":3}', b"\xff\n", b"\n"):
        asked, answer = sent(folder, control, content)
        assert not asked and b"This is no request" in answer
    for _ in range(num_changes):
        content = mutated(good, draw)[:60_000] or b"\n"
        asked, answer = sent(folder, control, content)
        assert asked or b"This is no request" in answer, content
    assert sent(folder, control, good) == ([ControlRequest("data=3")], b"")


def test_what_is_no_request_is_refused(tmp_path: Path, control: ControlSocket) -> None:
    check_control(tmp_path, control, QUICK, seed=1)


@pytest.mark.full
def test_much_that_is_no_request(tmp_path: Path, control: ControlSocket) -> None:
    check_control(tmp_path, control, FULL, seed=int.from_bytes(os.urandom(4)))


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 60_000,
        b"{}",
        b"null\n",
        b"\xff\n",
        b'{"done": 3}\n',
        b"x" * 100_000,
        b'{"refused": 1}',
    ],
)
def test_a_run_that_answers_nonsense_is_told_of(
    tmp_path: Path, answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its directory may be another's, with another program behind the socket."""
    (tmp_path / "run.json").write_text("{}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()

        def speak() -> None:
            line, _ = listening.accept()
            with line:
                line.recv(1000)
                line.sendall(answer)

        speaking = threading.Thread(target=speak)
        speaking.start()
        assert run_here(["resize", str(tmp_path), "data=3"]) == 2
        speaking.join()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["\ud800", "a\nb", "", "x" * 5000, 3, "../x", "__metadata__", "a\0b"]
)
def test_a_tensor_of_any_name_is_imported_or_refused(name: Any, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2)}, tmp_path / "model.pt")
    out = str(tmp_path / "out")
    code = run_here(["checkpoint", "import", str(tmp_path / "model.pt"), out])
    assert code == (2 if name == "\ud800" else 0)
    if not code:
        assert run_here(["checkpoint", "verify", out]) == 0
        weights = str(tmp_path / "weights")
        assert run_here(["checkpoint", "export", out, weights, "--to", "safetensors"]) in (0, 2)
