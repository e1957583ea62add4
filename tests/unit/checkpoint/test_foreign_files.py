"""Safetensors, Hugging Face's layout and state_dict files: out as torch and others read them,
and in again; what is not sound is refused with the reason."""

import io
import os
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from shoal.checkpoint.dtypes import _TYPES
from shoal.checkpoint.load import CheckpointReader
from shoal.errors import BadCheckpoint, UsageError
from shoal.formats.dcp import export_dcp
from shoal.formats.huggingface import INDEX, export_huggingface, open_huggingface, split_shards
from shoal.formats.safetensors import export_safetensors, open_safetensors
from shoal.formats.state_dict import export_state_dict, open_state_dict
from shoal.formats.weights import ForeignWeights, ModelWeights
from shoal.parallel.layout import Slice
from tests.unit.checkpoint.made import NAME, make, tensors


def of_all_types() -> dict[str, Tensor]:
    some = {f"t.{name}": torch.arange(6).view(2, 3).to(dtype) for name, dtype in _TYPES.items()}
    return {**some, "ä": torch.tensor(3.5), "none": torch.empty(0, 3), "odd": torch.ones(3).byte()}


def opened(tmp_path: Path, state: dict[str, Tensor], **more) -> CheckpointReader:
    named = {f"model.{name}": tensor for name, tensor in state.items()}
    return CheckpointReader(make(tmp_path / "from", named, **more), NAME)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].contiguous().reshape(-1).view(torch.uint8), raw(tensor))
        for name, tensor in wanted.items()
    )


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def read_back(found: ForeignWeights) -> dict[str, Tensor]:
    return {name.removeprefix("model."): found.whole(name) for name in found}


def test_safetensors_are_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    state = of_all_types()
    export_safetensors(ModelWeights(opened(tmp_path, state)), tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == save(state)
    assert same(read_back(open_safetensors(tmp_path / "m.safetensors")), state)
    assert sorted(os.listdir(tmp_path)) == ["from", "m.safetensors"]


def test_only_the_model_is_exported(tmp_path: Path) -> None:
    source = CheckpointReader(make(tmp_path / "from", tensors()), NAME)
    model = ModelWeights(source, only={"cut", "half"})
    export_safetensors(model, tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"cut", "half"}
    assert set(model.left_out) == {"also", "count", "flag", "none"}


def test_of_replicas_the_mean_is_exported(tmp_path: Path) -> None:
    state = {
        "replica.0.model.w": torch.tensor([1.0, 2.0]),
        "replica.1.model.w": torch.tensor([3.0, 6.0]),
        "model.shared": torch.ones(1),
    }
    source = CheckpointReader(make(tmp_path, state, plain={"replicas": 2}), NAME)
    model = ModelWeights(source)
    assert sorted(model.names) == ["shared", "w"]
    assert model.whole("w").tolist() == [2.0, 4.0]


def test_a_changed_checkpoint_is_not_exported(tmp_path: Path) -> None:
    source = opened(tmp_path, {"w": torch.ones(1000)})
    file = tmp_path / "from" / NAME / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    others = (export_dcp, export_huggingface, lambda m, p: export_state_dict(m, p, {}))
    for export in (export_safetensors, *others):
        with pytest.raises(BadCheckpoint, match="not those that were written"):
            export(ModelWeights(source), tmp_path / "out")
    assert os.listdir(tmp_path) == ["from"]


def test_what_is_there_stays(tmp_path: Path) -> None:
    model = ModelWeights(opened(tmp_path, {"w": torch.ones(2)}))
    (tmp_path / "there").write_text("mine")
    for export in (
        export_safetensors,
        export_huggingface,
        lambda m, p: export_state_dict(m, p, {}),
    ):
        with pytest.raises(UsageError, match="there already"):
            export(model, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be written"):
        export_safetensors(model, tmp_path / "there" / "below")


def test_shards_keep_the_order_and_the_limit() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 3}
    assert split_shards(sizes, 8) == [["a", "b"], ["c"], ["d", "e"]]
    assert split_shards(sizes, 100) == [["a", "b", "c", "d", "e"]]


def test_hugging_face_in_one_file_and_in_shards(tmp_path: Path) -> None:
    state = of_all_types()
    model = ModelWeights(opened(tmp_path, state))
    assert export_huggingface(model, tmp_path / "one") == 1
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    count = export_huggingface(model, tmp_path / "many", shard_bytes=100)
    assert count > 1 and len(os.listdir(tmp_path / "many")) == count + 1
    index = msgspec.json.decode((tmp_path / "many" / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    for where in ("one", "many"):
        assert same(read_back(open_huggingface(tmp_path / where)), state)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained_loads_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="reads the Hugging Face layout")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread for a progress bar
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=50,
        )
        model = transformers.LlamaForCausalLM(config)
    # As training keeps it: each tensor once, and buffers that are made again as well.
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    source = opened(tmp_path, {name: tensor.detach() for name, tensor in state.items()})
    weights = ModelWeights(source, set(model.state_dict()))
    assert export_huggingface(weights, tmp_path / "hf", 10_000, config) > 1
    loaded, report = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values())
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_an_index_cannot_leave_its_directory(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    for file, words in [
        ("../a.safetensors", "not the name of a file beside it"),
        (str(tmp_path / "a.safetensors"), "not the name of a file beside it"),
        ("b.safetensors", "No such file"),
    ]:
        (tmp_path / INDEX).write_bytes(msgspec.json.encode({"weight_map": {"a": file}}))
        with pytest.raises(BadCheckpoint, match=words):
            open_huggingface(tmp_path)
    for places, words in [
        ({"a": "a.safetensors", "b": "a.safetensors"}, "b is to be in a.safetensors"),
        ({"a": 3}, "cannot be read"),
    ]:
        (tmp_path / INDEX).write_bytes(msgspec.json.encode({"weight_map": places}))
        with pytest.raises(BadCheckpoint, match=words):
            open_huggingface(tmp_path)
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_bytes(msgspec.json.encode({"weight_map": {"a": "a.safetensors"}}))
    with pytest.raises(BadCheckpoint, match="does not say so"):
        open_huggingface(tmp_path)


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04pickle",
        (2**63).to_bytes(8, "little") + b"{}",
        header(b"{"),
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(4)),
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(12)),
        header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
            bytes(6),
        ),
        header(b'{"a":{"dtype":"WORDS","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', bytes(1)),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(BadCheckpoint):
        open_safetensors(path)
    assert time.monotonic() - started < 1


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(BadCheckpoint, match="not a file"):
        open_safetensors(tmp_path / "m.safetensors")
    with pytest.raises(BadCheckpoint, match="not a file"):
        open_state_dict(tmp_path / "m.safetensors")


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_the_state_dict(mmap: bool, tmp_path: Path) -> None:
    state = of_all_types()
    path = tmp_path / "m.pt"
    export_state_dict(ModelWeights(opened(tmp_path, state)), path, {"tied": "t.F32"})
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    tied = loaded.pop("tied")
    assert same(loaded, state) and type(loaded) is dict
    assert tied.untyped_storage().data_ptr() == loaded["t.F32"].untyped_storage().data_ptr()
    assert same(read_back(open_state_dict(path)), {**state, "tied": state["t.F32"]})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        content = path.read_bytes()
        for record in archive.infolist():
            if "/data/" in record.filename and record.file_size:
                head = record.header_offset
                name, extra = (
                    int.from_bytes(content[head + i : head + i + 2], "little") for i in (26, 28)
                )
                assert (head + 30 + name + extra) % 64 == 0


def test_equal_weights_are_equal_state_dict_bytes(tmp_path: Path) -> None:
    model = ModelWeights(opened(tmp_path, tensors()))
    export_state_dict(model, tmp_path / "a.pt", {})
    export_state_dict(model, tmp_path / "b.pt", {})
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_a_training_file_of_torch_is_read_by_prefix(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(content, tmp_path / "all.pt")
    found = open_state_dict(tmp_path / "all.pt")
    assert "epoch" in found.left_out and "model.model.0.weight" in found
    assert same(read_back(found.under("model.")), dict(model.state_dict()))
    with pytest.raises(BadCheckpoint, match=r"No name begins with 'net\.'"):
        found.under("net.")


def test_a_part_is_filled(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    torch.save({"w": whole.T}, tmp_path / "m.pt")  # strides of its own
    found = open_state_dict(tmp_path / "m.pt")
    part = torch.zeros(2, 2)
    found.fill("model.w", [Slice(part, (3, 4), (1, 2))])
    assert torch.equal(part, whole.T[1:3, 2:4])
    with pytest.raises(BadCheckpoint, match=r"float32 \[3, 4\], and float16 \[3, 4\] is wanted"):
        found.fill("model.w", [Slice(part.half(), (3, 4), (1, 2))])


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def test_a_state_dict_runs_no_code(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    torch.save({"w": torch.ones(1), "x": Evil(proof)}, tmp_path / "m.pt")
    with pytest.raises(BadCheckpoint, match=r"without running code.*posix.system"):
        open_state_dict(tmp_path / "m.pt")
    assert not proof.exists()


def test_every_flipped_byte_of_a_tensor_is_noticed(tmp_path: Path) -> None:
    stored = io.BytesIO()
    torch.save({"w": torch.ones(100)}, stored)
    content = stored.getvalue()
    at = content.index(torch.ones(100).numpy().tobytes())
    for i in range(at, at + 400, 41):
        changed = bytearray(content)
        changed[i] ^= 4
        (tmp_path / "m.pt").write_bytes(changed)
        with pytest.raises(BadCheckpoint, match="not those that were written"):
            open_state_dict(tmp_path / "m.pt")


def test_other_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save([torch.ones(1)], path)
    with pytest.raises(BadCheckpoint, match="holds a list"):
        open_state_dict(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(BadCheckpoint, match="holds no tensor"):
        open_state_dict(path)
    torch.save({"w": torch.eye(3).to_sparse()}, path)
    with pytest.raises(BadCheckpoint, match="Only plain dense tensors"):
        open_state_dict(path)
    path.write_bytes(b"\x80\x02" + bytes(100))
    with pytest.raises(BadCheckpoint, match=r"not what torch\.save writes"):
        open_state_dict(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1000))
    with pytest.raises(BadCheckpoint, match="is compressed"):
        open_state_dict(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(1000))
    with pytest.raises(BadCheckpoint, match=r"m\.pt cannot be read: (?!.*running code)"):
        open_state_dict(path)
    content = path.read_bytes()
    at = content.index(b"PK\x01\x02")  # the same record twice in the list
    entry, end = content[at : content.index(b"PK\x05\x06")], bytearray(content[-22:])
    end[8:16] = bytes([2, 0, 2, 0]) + (2 * len(entry)).to_bytes(4, "little")
    path.write_bytes(content[:at] + entry * 2 + end)
    with pytest.raises(BadCheckpoint, match="larger than the whole file"):
        open_state_dict(path)
    nested: dict = {"w": torch.ones(1)}
    nested["self"] = nested
    torch.save(nested, path)
    with pytest.raises(BadCheckpoint, match="nested deeper"):
        open_state_dict(path)
