"""Precision: the loss scale, and the remedy for CPUs whose bf16 does not run."""

import pytest
import torch

from shoal.errors import PlanError, UsageError
from shoal.numerics import precision
from shoal.numerics.precision import LossScale, Precision, PrecisionSchedule
from shoal.plans.plan import Plan


def test_names():
    assert Precision("bf16") == "bf16" and Precision("fp16").dtype is torch.float16
    with pytest.raises(UsageError, match="Did you mean 'fp16'"):
        Precision("fp166")


@pytest.mark.parametrize(
    ("text", "found", "lowest"),
    [
        ("fp32", "fp32 fp32 fp32", "fp32"),
        ("fp16", "fp16 fp16 fp16", "fp16"),
        ("bf16@2", "fp32 fp32 bf16", "bf16"),
        ("bf16:fp32@1", "bf16 fp32 fp32", "bf16"),
        ("bf16@1:fp32@2", "fp32 bf16 fp32", "bf16"),
    ],
)
def test_a_precision_for_each_step(text, found, lowest):
    schedule = PrecisionSchedule.parse(text)
    assert [schedule.at(step) for step in range(3)] == found.split()
    assert schedule.lowest == lowest and str(schedule) == text
    assert Plan.parse(f"data=2 precision={text}").precision == text, "as a plan prints it"


@pytest.mark.parametrize(
    "text", ["bf16@2:bf16@3", "bf16@x", "fp16@3", "bf16:fp32", "bf16@3:fp32@2"]
)
def test_turns_that_cannot_be(text):
    with pytest.raises((ValueError, UsageError)):
        PrecisionSchedule.parse(text)
    with pytest.raises(PlanError):
        Plan.parse(f"data=2 precision={text}")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_autocast_computes_in_the_type_and_keeps_parameters(name):
    kind = Precision(name)
    layer = torch.nn.Linear(4, 4)
    context = kind.autocast("cpu")
    for _ in range(2):
        with context:
            output = layer(torch.ones(2, 4))
        assert output.dtype is kind.dtype
    output.float().sum().backward()
    assert layer.weight.dtype is torch.float32 and layer.weight.grad.dtype is torch.float32


def test_only_fp16_has_a_scale():
    for name in ("fp32", "bf16"):
        scale = LossScale(name)
        for _ in range(LossScale.STEPS_TO_GROW):
            scale.good_step()
        assert scale.value == 1.0 and not scale.overflow()
        with pytest.raises(UsageError, match="only fp16"):
            scale.load(LossScale("fp16").state)


def test_the_scale_halves_to_one_and_grows_after_good_steps():
    scale = LossScale("fp16")
    assert scale.value == 2**16
    for halvings in range(1, 17):
        assert scale.overflow() and scale.value == 2 ** (16 - halvings)
    assert not scale.overflow() and scale.value == 1.0
    for _ in range(LossScale.STEPS_TO_GROW):
        assert scale.value == 1.0
        scale.good_step()
    assert scale.value == 2.0


def test_an_overflow_starts_the_count_again_and_the_scale_is_bounded():
    scale = LossScale("fp16")
    for _ in range(LossScale.STEPS_TO_GROW - 1):
        scale.good_step()
    scale.overflow()
    scale.good_step()
    assert scale.state == (2**15, 1)
    for _ in range(LossScale.STEPS_TO_GROW * 12):
        scale.good_step()
    assert scale.value == LossScale.MOST


def test_a_copied_state_goes_on_alike():
    first, second = LossScale("fp16"), LossScale("fp16")
    first.overflow()
    first.good_step()
    second.load(first.state)
    first.good_step()
    second.good_step()
    assert first.state == second.state


def test_cache_directory(tmp_path):
    def directory(**environment):
        return str(precision.cache_directory(environment))

    assert directory(SHOAL_CACHE="/a", XDG_CACHE_HOME="/b") == "/a"
    assert directory(XDG_CACHE_HOME="/b") == "/b/shoal"
    assert directory().endswith(".cache/shoal")


def test_remedies_are_tried_in_turn():
    assert precision.choose_remedy(lambda remedy: "", "CPU") == {}
    cure = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    found = precision.choose_remedy(lambda remedy: "" if remedy else "killed by SIGILL", "CPU")
    assert found == cure
    with pytest.raises(UsageError, match=r"CPU X.*killed by SIGILL.*precision=fp32"):
        precision.choose_remedy(lambda remedy: "killed by SIGILL", "CPU X")


# A child that dies as a CPU without working AMX makes it die, unless the remedy is set.
_ILLEGAL = """
import os, signal
if "ONEDNN_MAX_CPU_ISA" not in os.environ:
    os.kill(os.getpid(), signal.SIGILL)
"""


def test_a_child_that_dies_is_told_from_one_that_works(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert precision._try_bf16({}, _ILLEGAL) == "killed by SIGILL"
    assert precision._try_bf16({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, _ILLEGAL) == ""
    assert precision._try_bf16({}, "raise OSError('no torch')") == "OSError: no torch"


def test_the_answer_is_kept_and_asked_for_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "_cpu", lambda: ("CPU", ("avx2", "amx_bf16")))
    asked = []

    def attempt(remedy):
        asked.append(remedy)
        return "" if remedy else "killed by SIGILL"

    monkeypatch.setattr(precision, "_try_bf16", attempt)
    cure = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    assert precision.bf16_environment() == cure and len(asked) == 2
    assert precision.bf16_environment() == cure and len(asked) == 2
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b'{"cut o')
    assert precision.bf16_environment() == cure and len(asked) == 4


def test_a_cpu_without_amx_is_not_probed(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name : Some CPU\nflags : fpu avx2\n\nprocessor : 1\n")
    assert precision._cpu(str(cpuinfo)) == ("Some CPU", ("fpu", "avx2"))
    assert precision._cpu(str(tmp_path / "none")) == ("", ())
    monkeypatch.setattr(precision, "_cpu", lambda: ("Some CPU", ("fpu", "avx2")))
    monkeypatch.setattr(precision, "_try_bf16", lambda remedy: pytest.fail("probed"))
    assert precision.bf16_environment() == {}
