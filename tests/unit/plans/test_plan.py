"""The plan: its text, the rules between its keys, and how it is fitted to ranks and a batch."""

import os
import subprocess
import sys
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError, UsageError
from shoal.plans.keys import KEYS
from shoal.plans.plan import Plan, describe_keys
from shoal.plans.resize import resize_plan
from shoal.plans.rules import STAGES_OF, fits_schedule

COUNT = st.integers(1, 64)


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, object]:
    """A pipeline of two ranks or more, with microbatches that its schedule can run."""
    num_ranks = draw(st.integers(2, 8))
    schedule = draw(st.sampled_from(list(STAGES_OF)))
    fewest, most = STAGES_OF[schedule]
    counts = [count for count in range(1, 65) if fits_schedule(schedule, num_ranks, count)]
    return {
        "pipeline": num_ranks,
        "schedule": schedule,
        "microbatches": draw(st.none() | st.sampled_from(counts)),
        "stages": draw(st.none() | st.integers(fewest, int(min(most, 4)))),
    }


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, object]:
    """Parameter servers."""
    servers, staleness = draw(COUNT), draw(st.integers(0, 100) | st.just("any"))
    local = draw(st.sampled_from([{}, {"local_steps": 4, "outer": "nesterov", "codec": "int8"}]))
    deadline = draw(st.sampled_from(["none", *(["0.5", "30"] if local and staleness == 0 else [])]))
    return local | {
        "sync": "server",
        "servers": servers,
        "copies": draw(st.integers(1, servers)) if deadline == "none" else 1,
        "deadline": deadline,
        "staleness": staleness,
        "damping": draw(st.sampled_from(["none", *["inverse"] * (staleness != 0)])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
    }


@st.composite
def ways_to_agree(draw: st.DrawFn, keys: dict[str, object]) -> dict[str, object]:
    """Whole replicas: servers or local steps; else shards, or the order of sums as a choice."""
    is_whole = keys["tensor"] == 1 and "pipeline" not in keys
    if is_whole and keys["offload"] == "none" and draw(st.booleans()):
        return draw(fleets())
    local_steps = draw(st.integers(1, 500))
    if local_steps > 1:
        fraction = st.floats(0, 1, exclude_min=True)
        nesterov = st.builds("nesterov:{}:{}".format, fraction, st.floats(0, 0.99))
        outer = draw(st.sampled_from(["average", "nesterov"]) | nesterov)
        precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
        fragments = draw(st.integers(1, local_steps)) if is_whole else 1
        found = {"local_steps": local_steps, "outer": outer, "precision": precision}
        return found | {"fragments": fragments}
    zero = draw(st.integers(0, 2 if keys.get("schedule") in ("zero-bubble", "zbv") else 3))
    sums = "exact" if zero else draw(st.sampled_from(["exact", "ring"]))
    in_turn = [] if "pipeline" in keys else ["bf16@7", "fp32:bf16@3:fp32@9", "bf16:fp32@900"]
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16", *in_turn]))
    return {"zero": zero, "sums": sums, "precision": precision}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that is allowed; keys that need another are drawn only beside it."""
    keys: dict[str, object] = {
        "data": draw(st.none() | st.integers(2, 64)),
        "tensor": draw(st.just(1) | COUNT),
        "accumulate": draw(COUNT),
        "recompute": draw(st.sampled_from(["none", "blocks"])),
        "offload": draw(st.sampled_from(["none", "optimizer"])),
    }
    fraction = st.floats(1 / 1024, 0.6)
    codecs = st.sampled_from(["none", "fp16", "bf16", "int8", "int4", "onebit"])
    codecs |= st.builds("topk:{}".format, fraction) | st.builds("powersgd:{}".format, COUNT)
    codec = draw(codecs)
    if draw(st.booleans()):
        keys |= draw(pipelines())
    keys |= draw(ways_to_agree(keys))
    with suppress(PlanError):  # not every codec goes with every way
        Plan(**keys | {"codec": codec})
        keys["codec"] = codec
    if draw(st.booleans()):
        keys["pieces"] = draw(sound_pieces(Plan(**keys)))
    return Plan(**keys)


@st.composite
def sound_pieces(draw: st.DrawFn, plan: Plan) -> int:
    """Equally many for each replica, or more for some where a plan allows it."""
    rounds = (plan.data or draw(COUNT)) * plan.accumulate
    if plan.data and plan.accumulate == plan.local_steps == 1 and plan.zero < 3:
        rounds += draw(st.integers(0, plan.data))
    return rounds * plan.num_microbatches


@given(plans(), st.sampled_from([" ", ",", ", "]))
def test_text_and_plan_are_the_same(plan: Plan, separator: str) -> None:
    assert Plan.parse(str(plan).replace(" ", separator)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)


@given(plans())
def test_a_plan_survives_a_message(plan: Plan) -> None:
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_defaults_print_nothing() -> None:
    assert str(Plan()) == ""
    assert Plan.parse("") == Plan()
    text = "data=auto tensor=1 zero=0 local_steps=1 sums=exact codec=none precision=fp32"
    assert Plan.parse(text) == Plan()


def test_values_have_one_form() -> None:
    plan = Plan.parse("local_steps=8 outer=nesterov codec=topk:1e-2")
    assert str(plan) == "local_steps=8 outer=nesterov:0.7:0.9 codec=topk:0.01"
    assert plan == Plan(local_steps=8, outer="nesterov:0.70", codec="topk:0.010")
    assert hash(plan) == hash(Plan.parse(str(plan)))


def test_a_plan_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Plan().data = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dat=2", "Did you mean 'data'?"),
        ("batch=2", "Known: accumulate, bucket, codec"),
        ("data=2 data=2", "given twice"),
        ("data", "not key=value"),
        ("data = 2", "no space around the '='"),
        ("data=0", "auto, or 1 or more"),
        ("data=-1", "not possible"),
        ("data=2.0", "not possible"),
        ("data=\u00b2", "not possible"),
        ("zero=4", "0, 1, 2, 3"),
        ("schedule=fast pipeline=2", "1f1b, gpipe"),
        ("precision=fp8", "fp32, bf16, fp16"),
        ("precision=fp16@9", "fp32 and bf16 in turn"),
        ("precision=bf16:bf16@9", "not possible"),
        ("precision=bf16@9:fp32@9", "not possible"),
        ("precision=bf16@0", "not possible"),
        ("precision=bf16:fp32", "not possible"),
        ("precision=bf16@", "not possible"),
        ("codec=topk:0", "1/1024 <= F <= 1"),
        ("codec=topk:0.0009", "1/1024 <= F <= 1"),
        ("codec=topk:nan", "1/1024 <= F <= 1"),
        ("codec=topk", "1/1024 <= F <= 1"),
        ("codec=topk:0.1+int4", "topk:F+int8"),
        ("codec=topk:0.1+", "topk:F+int8"),
        ("codec=int8+topk", "topk:F+int8"),
        ("codec=powersgd:1+int8", "R of 1 or more"),
        ("codec=powersgd:0", "R of 1 or more"),
        ("codec=int8:4", "int8"),
        ("outer=nesterov:0.7:1 local_steps=2", "0 <= momentum < 1"),
        ("outer=nesterov:inf local_steps=2", "rate > 0"),
        ("outer=average:1 local_steps=2", "average, nesterov"),
        ("sync=server staleness=some", "0 or more, or any"),
        ("data=2 sync=server local_steps=2 deadline=0", "seconds above 0"),
        ("data=2 sync=server local_steps=2 deadline=nan", "seconds above 0"),
        ("data=2 sync=server local_steps=2 deadline=soon", "none, or seconds above 0"),
        ("data=2 sync=server servers=257", "1 to 256"),
        ("sync=server combine=trimmed:0.5", "0 < F < 0.5"),
        ("sync=server staleness=1 rates=1:0", "a number above 0"),
        ("sync=server staleness=1 rates=1:0", "a number above 0 for each replica"),
        ("sync=server staleness=1 rates=1:inf", "a number above 0 for each replica"),
        ("sync=server staleness=1 damping=square", "none, inverse"),
        ("sync=server combine=trimmed:0.5", "0 < F < 0.5"),
    ],
)
def test_bad_words_are_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("zero=1 data=1", "use data=2 or more"),
        ("microbatches=4", "add pipeline=2 or more"),
        ("stages=2", "add pipeline=2 or more"),
        ("schedule=gpipe", "add pipeline=2 or more"),
        ("schedule=1f1b", "add pipeline=2 or more"),
        ("staleness=4", "add sync=server"),
        ("staleness=0", "add sync=server"),
        ("data=1 sync=server staleness=2", "add sync=server and data=2 or more"),
        ("data=2 sync=server staleness=1 rates=1:1.0", "give one that is not 1"),
        ("servers=2", "add sync=server"),
        ("data=2 hosts=2", "add sync=server"),
        ("copies=2", "add sync=server"),
        ("data=2 local_steps=2 deadline=5", "add sync=server, local_steps=2 and data=2 or more"),
        ("data=2 sync=server deadline=5", "there are no rounds to close"),
        ("sync=server damping=inverse", "add sync=server and staleness=1 or more"),
        ("sync=server rates=1:2", "add sync=server and staleness=1 or more"),
        ("sync=server staleness=2 combine=median", "and leave staleness out"),
        ("combine=trimmed:0.2", "add sync=server, and leave staleness out"),
        ("outer=average", "add local_steps=2 or more"),
        ("outer=nesterov", "add local_steps=2 or more"),
        ("local_steps=4 data=1", "use data=2 or more"),
        ("local_steps=4 data=4 replicas=1", "and no replicas=1"),
        ("data=4 replicas=2", "add local_steps=2 or more, or sync=server"),
        ("fragments=2", "use local_steps=2 and data=2 or more"),
        ("fragments=2 local_steps=4 data=1 outer=nesterov", "use local_steps=2 and data=2"),
        ("codec=int4 local_steps=4 data=1 outer=nesterov", "use data=2 or more"),
        ("codec=int8 data=1", "use data=2 or more"),
        ("zero=1 data=2 sums=ring", "leave zero out"),
    ],
)
def test_keys_without_effect_are_refused(text: str, way_out: str) -> None:
    with pytest.raises(PlanError, match="has no effect") as refused:
        Plan.parse(text)
    assert way_out in str(refused.value)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("sync=server servers=2 copies=3", "Use servers=3 or copies=2."),
        ("data=2 sync=server local_steps=2 staleness=1 deadline=5", "there are no rounds"),
        ("data=2 sync=server servers=2 copies=2 local_steps=2 deadline=5", "Leave copies out"),
        ("data=4 sync=server hosts=2 staleness=1", "Leave staleness or hosts out."),
        ("data=4 sync=server hosts=2 combine=median", "Leave combine or hosts out."),
        ("data=4 sync=server hosts=2 local_steps=2", "Leave local_steps or hosts out."),
        ("data=4 sync=server hosts=2 codec=fp16", "Leave codec or hosts out."),
        ("data=4 sync=server hosts=3", "Use data=6, or another multiple of 3"),
        ("data=2 sync=server hosts=2", "hosts=2 has no effect with data=2"),
        ("data=6 sync=server hosts=2 pieces=6", "Use pieces=8"),
        ("sync=server tensor=2", "Use servers=2, or another multiple of 2"),
        ("sync=server pipeline=2 servers=2 codec=int8", "servers of each part round in other"),
        ("sync=server tensor=2 servers=2 codec=bf16", "add up in an order of their own"),
        ("data=2 sync=server servers=4 pipeline=2 copies=2", "no server is replaced alone"),
        ("data=4 sync=server replicas=2 hosts=2", "adds up what single ranks push"),
        ("data=6 sync=server replicas=2", "Use data=8, or as many for each replica as"),
        ("data=4 sync=server replicas=2 pieces=12", "Use pieces=4 or 8"),
        ("data=4 sync=server replicas=2 combine=median", "Use replicas=3 or more"),
        ("data=3 pipeline=2 sync=server servers=2 staleness=1 pieces=16", "need equally many"),
        ("data=2 replicas=1 sync=server staleness=1", "no other replica to be ahead of"),
        ("data=4 replicas=2 zero=2 sync=server", "Leave zero out, or sync=server."),
        ("sync=server zero=2", "Leave zero out, or sync=server."),
        ("sync=server offload=optimizer", "Leave offload out, or sync=server."),
        ("sync=server local_steps=4 data=2 fragments=2", "servers bring whole windows together"),
        ("sync=server local_steps=4 data=3 combine=median", "Leave one of them out."),
        ("sync=server sums=ring", "Leave sums out."),
        ("data=3 sync=server staleness=1 rates=1:2", "Give 3 of them, separated by colons"),
        ("data=2 sync=server combine=median", "Use data=3 or more, or leave combine out."),
        ("pipeline=2 precision=bf16@9", "what stages send each other has one type"),
        ("data=2 sync=server combine=median", "Use data=3 or more"),
        ("data=4 combine=median", "add sync=server"),
        ("data=4 sync=server staleness=1 combine=trimmed:0.1", "leave staleness out"),
        ("data=2 sync=server damping=inverse", "staleness=1 or more"),
        ("data=2 sync=server staleness=1 rates=1:1:1", "Give 2 of them"),
        ("zero=1 local_steps=4", "add replicas=R below data, or leave zero out."),
        ("data=4 zero=1 local_steps=4 replicas=4", "zero shards over data/replicas"),
        ("data=4 local_steps=4 replicas=3", "Use replicas=1 or 2 or 4."),
        ("data=2 tensor=2 local_steps=4 codec=int8", "or cut with pipeline"),
        ("data=4 zero=3 replicas=2 local_steps=4 codec=int8", "could not prove it"),
        ("data=4 pipeline=2 zero=3 replicas=2 local_steps=4 codec=int8", "could not prove it"),
        ("data=2 tensor=2 sync=server servers=2 local_steps=4 codec=int8", "an order of their own"),
        ("data=2 pipeline=2 sync=server local_steps=4", "Use servers=2, or another multiple of 2"),
        ("data=4 zero=3 replicas=2 sync=server local_steps=4", "Use zero=2, or leave sync"),
        ("local_steps=4 fragments=5", "Use fragments=4 or fewer, or more local_steps."),
        ("local_steps=4 codec=int8 sums=ring", "Leave sums out"),
        ("data=4 pieces=3", "Use pieces=4 or more, or data=3 or fewer."),
        ("data=2 accumulate=2 pieces=6", "data=2 x accumulate=2 = 4"),
        ("accumulate=3 pieces=4", "Leave one of them out."),
        ("pipeline=2 pieces=6", "Use pieces=8"),
        ("data=2 local_steps=2 pieces=3", "Use a multiple of data."),
        ("pipeline=2 stages=2", "use another schedule"),
        ("pipeline=2 schedule=zbv stages=3", "needs 2 on each rank"),
        ("pipeline=2 schedule=interleaved stages=1", "needs 2 or more on each rank"),
        ("pipeline=4 microbatches=3", "which needs one for each rank at least"),
        ("pipeline=4 microbatches=3", "Use microbatches=4 or 8, or schedule=gpipe."),
        ("pipeline=2 schedule=interleaved microbatches=5", "falls into 2 equal rounds"),
        ("pipeline=3 schedule=zero-bubble microbatches=7", "Use microbatches=6 or 9"),
        ("pipeline=2 schedule=zero-bubble zero=3", "FSDP2 has let go of the weights by then"),
        ("pipeline=2 schedule=zbv zero=3", "Use zero=1 or zero=2, or schedule=1f1b"),
        ("data=2 zero=3 pieces=3", "does not give each of data=2 replicas equally many"),
        ("data=2 zero=3 pipeline=2 pieces=12", "Use a multiple of data x microbatches."),
    ],
)
def test_contradictions_are_refused(text: str, way_out: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert way_out in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "data=2 zero=2 pieces=3",
        "data=2 sums=ring",
        "pipeline=4 schedule=gpipe microbatches=3",
        "pipeline=2 schedule=zbv zero=2",
        "pipeline=2 schedule=interleaved zero=3 microbatches=3",
        "local_steps=4 precision=bf16",
        "local_steps=4 fragments=4",
        "local_steps=4 precision=fp16",
        "sync=server precision=fp16 staleness=any",
        "data=4 zero=3 replicas=2 local_steps=4 tensor=2 pipeline=2",
        "data=4 zero=2 replicas=2 local_steps=4 codec=int8 fragments=2",
        "data=4 replicas=4 local_steps=4",
        "data=2 pipeline=2 local_steps=4 codec=int8",
        "data=4 zero=1 replicas=2 sync=server local_steps=4 codec=int8",
        "data=4 replicas=2 sync=server servers=2 local_steps=4 staleness=1 rates=1:0.5",
        "data=2 tensor=2 sync=server servers=2 local_steps=4 staleness=1",
        "data=2 pipeline=2 sync=server servers=2 local_steps=4 deadline=5",
        "data=2 tensor=2 pipeline=2 sync=server servers=4 staleness=any",
        "data=4 replicas=2 sync=server accumulate=2",
        "data=2 pipeline=2 sync=server servers=2 codec=bf16",
        "data=2 tensor=2 local_steps=4 fragments=2",
        "local_steps=4 data=1 outer=nesterov",
        "data=1 zero=0 tensor=2",
    ],
)
def test_neighbours_of_what_is_refused_are_allowed(text: str) -> None:
    assert Plan.parse(text)


def test_a_plan_made_in_python_meets_the_same_rules() -> None:
    for keys in ({"data": 0}, {"data": 2.5}, {"zero": "two"}, {"staleness": 3}, {"tensor": None}):
        with pytest.raises(PlanError):
            Plan(**keys)
    with pytest.raises(PlanError):
        msgspec.structs.replace(Plan(zero=1), data=1)


def resolve(text: str, *, ranks: int | None = None, cores: int = 2, batch_size: int = 32) -> str:
    return str(Plan.parse(text).resolve(ranks=ranks, cores=cores, batch_size=batch_size))


@pytest.mark.parametrize(
    ("text", "ranks", "cores", "resolved"),
    [
        ("", None, 1, "data=1 pieces=1"),
        ("", None, 2, "data=2 pieces=2"),
        ("", None, 3, "data=2 pieces=2"),
        ("", None, 64, "data=32 pieces=32"),
        ("", 4, 2, "data=4 pieces=4"),
        ("data=4", None, 2, "data=4 pieces=4"),
        ("data=4", 4, 2, "data=4 pieces=4"),
        ("accumulate=16", None, 4, "data=2 accumulate=16 pieces=32"),
        ("pieces=4", None, 3, "data=2 pieces=4"),
        ("pieces=4", 3, 2, "data=3 pieces=4"),
        ("accumulate=2 pieces=4", None, 8, "data=2 accumulate=2 pieces=4"),
        ("data=2 sums=ring precision=fp16", None, 2, "data=2 sums=ring precision=fp16 pieces=2"),
        ("local_steps=4 outer=average", None, 2, "data=2 local_steps=4 pieces=2"),
    ],
)
def test_plans_are_fitted(text: str, ranks: int | None, cores: int, resolved: str) -> None:
    assert resolve(text, ranks=ranks, cores=cores) == resolved


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        ("data=3", None, "data=3 does not divide the batch of 32."),
        ("data=3", None, "Use 1, 2, 4, 8, 16 or 32."),
        ("", 3, "3 ranks make data=3. data=3 does not divide the batch of 32."),
        ("", 0, "Start at least 1."),
        ("data=2", 4, "needs 2 ranks, and there are 4."),
        ("data=2", 4, "Use data=4, or start 2 ranks."),
        ("data=2 accumulate=3", None, "data=2 x accumulate=3 = 6 pieces do not divide"),
        ("data=2 accumulate=3", None, "For accumulate use 1, 2, 4, 8 or 16."),
        ("accumulate=64", None, "For accumulate use 1, 2, 4, 8, 16 or 32."),
        ("pieces=5", None, "pieces=5 does not divide the batch of 32."),
        ("pieces=4", 8, "leaves some of the data=8 replicas without work"),
        ("accumulate=2 pieces=8", None, "asks for data=4, and only 2 fit on 2 cores"),
        ("accumulate=2 pieces=8", 2, "Leave accumulate or pieces out."),
    ],
)
def test_plans_that_do_not_fit_are_refused(text: str, ranks: int | None, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        resolve(text, ranks=ranks)
    assert says in str(refused.value)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="at least 1 sample"):
        resolve("", batch_size=0)


def test_of_many_divisors_the_nearest_are_named() -> None:
    with pytest.raises(PlanError, match=r"Use 7, 8, 9, 10, 12 or 14\."):
        resolve("data=11", batch_size=5040)


@given(plans(), st.none() | COUNT, st.integers(1, 16), st.integers(1, 512))
def test_a_fitted_plan_keeps_every_promise(
    plan: Plan, ranks: int | None, cores: int, batch_size: int
) -> None:
    try:
        fitted = plan.resolve(ranks=ranks, cores=cores, batch_size=batch_size)
    except PlanError:
        return
    assert batch_size % fitted.num_pieces == 0
    assert fitted.num_replicas <= fitted.num_pieces
    assert fitted.num_pieces % fitted.num_microbatches == 0
    assert fitted.num_ranks == (ranks or fitted.num_ranks)
    assert plan.data in (None, fitted.data)
    assert plan.pieces in (None, fitted.pieces)
    assert Plan.parse(str(fitted)) == fitted
    again = fitted.resolve(ranks=fitted.num_ranks, cores=cores, batch_size=batch_size)
    assert again == fitted


def test_axes_share_the_ranks() -> None:
    assert resolve("tensor=2", cores=8) == "data=4 tensor=2 pieces=4"
    assert resolve("pipeline=2", ranks=4) == "data=2 pipeline=2 pieces=8"
    assert resolve("tensor=2 pipeline=2", cores=2) == "data=1 tensor=2 pipeline=2 pieces=4"
    with pytest.raises(PlanError, match="Start 4 ranks"):
        resolve("tensor=2", ranks=3)
    with pytest.raises(PlanError, match=r"For microbatches use 2, 4, 8, 16 or 32\."):
        resolve("pipeline=2 microbatches=3")
    with pytest.raises(PlanError, match=r"For microbatches use 8\."):
        resolve("pipeline=5", batch_size=16)
    with pytest.raises(PlanError, match="No number of microbatches suits pipeline=5"):
        resolve("pipeline=5", batch_size=4)
    with pytest.raises(PlanError, match="with data=1"):
        resolve("zero=2", cores=1)


def test_counts_of_an_open_plan_are_refused() -> None:
    plan = Plan()
    for name in ("num_ranks", "num_replicas", "num_pieces"):
        with pytest.raises(PlanError, match="resolve"):
            getattr(plan, name)
    fitted = plan.resolve(ranks=4, cores=2, batch_size=8)
    assert (fitted.num_ranks, fitted.num_replicas, fitted.num_pieces) == (4, 4, 4)


@pytest.mark.parametrize(
    "text",
    [
        "tensor=2",
        "pipeline=2 schedule=zbv",
        "data=2 zero=1",
        "data=2 zero=3",
        "sync=server",
        "data=2 sync=server servers=2 staleness=4",
        "sync=server staleness=any precision=bf16",
        "sync=server precision=fp16",
        "local_steps=4",
        "local_steps=4 outer=nesterov:0.5:0.0 fragments=2 codec=int4",
        "recompute=blocks",
        "offload=optimizer",
    ],
)
def test_a_technique_that_is_built_is_followed(text: str) -> None:
    plan = Plan.parse(text)
    fitted = plan.resolve(ranks=None, cores=8, batch_size=32)
    for key, _, value in (word.partition("=") for word in text.split()):
        assert str(getattr(fitted, key)) == value


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("data=2 codec=auto zero=3", "Name a codec, or use zero=1 or zero=2."),
        ("data=2 pipeline=2 codec=int8 zero=3", "leave pipeline or codec out"),
        ("data=2 codec=int8 tensor=2 zero=1", "Leave zero out"),
        ("data=2 codec=powersgd:2 tensor=2", "Leave tensor out, or use codec=int8"),
        ("data=2 codec=auto tensor=2", "Leave tensor out, or use codec=int8"),
        ("data=2 codec=int8 sums=ring", "Leave sums out"),
        ("data=2 codec=topk:0.7", "six bytes with its place"),
        ("data=2 sync=server codec=onebit", "a bit has no zero"),
        ("data=2 local_steps=4 codec=powersgd:2", "Use codec=int8"),
        ("data=2 sync=server codec=powersgd:2", "Use codec=int8"),
        ("data=2 sync=server staleness=1 codec=int8", "Use codec=fp16 or codec=bf16"),
        ("data=3 sync=server codec=fp16 combine=median", "could hide behind rounding"),
    ],
)
def test_a_codec_that_could_not_be_followed_is_refused(text: str, way_out: str) -> None:
    with pytest.raises(PlanError, match=r"does not go with|has no effect") as refused:
        Plan.parse(text)
    assert way_out in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "data=2 codec=topk:0.01+int8",
        "data=2 zero=2 codec=onebit",
        "data=2 zero=3 codec=powersgd:2",
        "data=2 tensor=2 codec=int8",
        "data=2 pipeline=2 codec=powersgd:4",
        "data=2 sync=server codec=int8",
        "data=2 sync=server staleness=any codec=fp16",
        "data=2 local_steps=4 codec=topk:0.01",
        "data=2 sync=server local_steps=4 codec=onebit",
    ],
)
def test_codecs_go_with_every_way_to_agree(text: str) -> None:
    assert str(Plan.parse(text)) == text


def test_an_outer_step_of_an_average_goes_all_the_way() -> None:
    assert Plan.parse("local_steps=4").outer_rates == (1.0, 0.0)
    assert Plan.parse("local_steps=4 outer=nesterov:0.5").outer_rates == (0.5, 0.9)
    assert not Plan.parse("local_steps=4").has_anchor
    for more in ("outer=nesterov", "codec=int8", "fragments=2"):
        assert Plan.parse(f"local_steps=4 {more}").has_anchor


def test_keys_are_described_in_one_place() -> None:
    fields = [field.name for field in msgspec.structs.fields(Plan)]
    assert [key for key, _, _ in describe_keys()] == fields == list(KEYS)
    for _, values, meaning in describe_keys():
        assert values and meaning


def test_the_plan_does_not_load_torch() -> None:
    code = (
        "import sys, shoal.plans.plan; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_servers_that_keep_copies_stay_as_many_as_they_are() -> None:
    plan = Plan.parse("data=2 sync=server servers=2 copies=2 pieces=4")
    assert resize_plan(plan, "data=3").data == 3
    with pytest.raises(UsageError, match="copies=2, whose servers keep one another's shards"):
        resize_plan(plan, "servers=3")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("sync=server hosts=2", "the ranks that they began with"),
        ("local_steps=2 outer=nesterov fragments=2", "each fragment at another time"),
    ],
)
def test_runs_whose_ranks_cannot_come_and_go_keep_their_size(words: str, why: str) -> None:
    plan = Plan.parse(f"data=4 pieces=4 {words}")
    with pytest.raises(UsageError, match=f"cannot be resized: .*{why}"):
        resize_plan(plan, "data=1")


@pytest.mark.parametrize(
    ("words", "fitting"),
    [
        ("", "data=2, data=3 or data=6"),
        ("outer=nesterov", "data=1, data=2, data=3 or data=6"),
        ("sync=server", "data=1, data=2, data=3 or data=6"),
        ("sync=server staleness=1", "data=2, data=3 or data=6"),
    ],
)
def test_replicas_of_local_steps_share_the_pieces_evenly(words: str, fitting: str) -> None:
    plan = Plan.parse(f"data=2 pieces=6 local_steps=4 {words}")
    assert resize_plan(plan, "data=3") == Plan.parse(f"data=3 pieces=6 local_steps=4 {words}")
    with pytest.raises(PlanError, match=f"data=4 does not divide the 6 .* Use {fitting}"):
        resize_plan(plan, "data=4")


def test_copies_of_servers_that_count_replicas_keep_both_numbers() -> None:
    plan = Plan.parse("data=2 sync=server servers=2 copies=2 pieces=4 local_steps=2")
    with pytest.raises(UsageError, match="data 2 -> 4: numbers of replicas and servers do not"):
        resize_plan(plan, "data=4")


def test_a_teacher_has_no_ranks() -> None:
    with pytest.raises(PlanError, match=r"no key 'teacher'.*`shoal distill --teachers N` lets it"):
        Plan.parse("data=2 teacher=1")
