"""What a server makes of messages: what is wrong is said to its sender, and changes nothing."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.shared_memory import SharedSegment
from shoal.comm.tree import Block
from shoal.comm.wire import bytes_of
from shoal.sync.server import core
from shoal.sync.server.messages import (
    Acknowledged,
    Apply,
    AskHalt,
    CheckRequest,
    DumpedState,
    DumpState,
    Halt,
    LoadState,
    MissingRows,
    Pull,
    PulledParameters,
    Push,
    Pushes,
    RequestRefused,
    ServerWelcome,
    Sum,
    Summed,
    WorkerHello,
)
from shoal.sync.server.server import Server
from shoal.sync.state import pack_state, unpack_state
from tests.unit.sync.server.played import (
    GENERATION,
    SECRET,
    Worker,
    make_server,
    only,
    push_all,
    send,
    state_bytes,
    tensor_bytes,
    values,
)

HUGE = 2**63 - 1


def meet(bound: int | None = 0, seats: int = 2, pieces: int = 3) -> tuple[Server, list[Worker]]:
    server = make_server(seats=seats, pieces=pieces, bound=bound, kind="adam")
    workers = [Worker(seat, server) for seat in range(seats)]
    for worker in workers:
        worker.settings = [{"lr": 0.1}]
        assert isinstance(only(send(server, worker, worker.hello())), ServerWelcome)
    return server, workers


def all_of(server: Server) -> bytes:
    """Everything that a message could have changed."""
    batches = server._rows._batches
    rows = [
        (batch, key, block, bytes(bytes_of(row)))
        for batch, kept in sorted(batches.items())
        for key, own in sorted(kept.rows.items())
        for block, row in sorted(own.items())
    ]
    sessions = sorted((name, session.pieces) for name, session in server.sessions.items())
    waiting = sorted(map(repr, server._waiting.items()))
    told = (rows, sessions, waiting, server._begun, server._halt, server.version)
    return state_bytes(server) + repr(told).encode()


def refusal(
    server: Server, worker: Worker, message: Any, payload: Sequence[bytes | Tensor] = ()
) -> RequestRefused:
    before = all_of(server)
    (answer,) = send(server, worker, message, payload)
    assert isinstance(answer.message, RequestRefused), answer
    assert answer.to == worker.name and answer.message.request == message.request
    assert all_of(server) == before
    return answer.message


# ---- who may speak


@pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION + 1, -1, HUGE, -HUGE])
@pytest.mark.parametrize("kind", ["hello", "push", "sum", "apply", "pull"])
def test_another_generation_is_refused(generation: int, kind: str) -> None:
    server, (worker, _) = meet()
    push_all(server, worker, 0, 1.0)
    worker.generation = generation
    arguments = {"hello": (), "push": (0, 0)}.get(kind, (0,))
    assert refusal(server, worker, getattr(worker, kind)(*arguments), worker.rows(0, 1.0)).is_stale


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"secret": "of another run"}, "another run's"),
        ({"secret": ""}, "another run's"),
        ({"layout": "0" * 16}, "same recipe"),
        ({"seat": 2}, "no seat 2"),
        ({"seat": -1}, "no seat -1"),
        ({"seat": HUGE}, "no seat"),
        ({"num_rows": 0}, "rows"),
        ({"num_rows": -1}, "rows"),
        ({"num_rows": HUGE}, "rows"),
    ],
)
def test_a_stranger_is_not_let_in(wrong: dict[str, Any], why: str) -> None:
    server = make_server(seats=2, pieces=2)
    worker = Worker(0, server)
    assert why in refusal(server, worker, worker.hello(**wrong)).why
    rest = [worker.push(0, 0), worker.sum(0), worker.apply(0), worker.pull(0)]
    rest += [worker.make(AskHalt, batch=0), worker.make(DumpState), worker.make(LoadState, step=0)]
    for message in rest:
        assert "Greet first" in refusal(server, worker, message).why


def test_memory_that_is_too_small_for_the_rows_is_refused() -> None:
    server, (worker, _) = meet()
    other, segment = Worker(0, server), SharedSegment.create(1)
    other.name = b"other"
    small = msgspec.structs.replace(segment.place, num_bytes=16)
    assert "do not fit" in refusal(server, other, other.hello(rows=small)).why
    gone = msgspec.structs.replace(segment.place, name="shoal-none")
    welcome = only(send(server, other, other.hello(rows=gone)))
    assert isinstance(welcome, ServerWelcome) and not welcome.is_shared
    assert "shared" in refusal(server, worker, worker.push(0, 0, is_shared=True)).why
    segment.close()


def test_greeting_twice_is_greeting_once() -> None:
    server, (worker, _) = meet(bound=None)
    session, hello = server.sessions[worker.name], worker.hello()
    assert all(isinstance(only(send(server, worker, hello)), ServerWelcome) for _ in range(2))
    assert server.sessions[worker.name] is session


# ---- what is wrong with a message


def bent_pushes(worker: Worker) -> list[tuple[Push, list[Tensor]]]:
    rows, length = worker.rows(0, 1.0), len(worker.rows(0, 1.0)[0])
    wrong = [
        {"key": 99},
        {"key": -1},
        {"key": HUGE},
        {"batch": -1},
        {"batch": 1},
        {"batch": HUGE},
        {"attempt": -1},
        {"touched": []},
        {"touched": [True] * 9},
        {"blocks": []},
        {"blocks": [Block(0, 3)]},
        {"blocks": [Block(1, 2)]},
        {"blocks": [Block(0, 0)]},
        {"blocks": [Block(-1, 1)]},
        {"blocks": [Block(0, HUGE)]},
        {"blocks": [Block(HUGE, 1)]},
        {"blocks": [*worker.blocks, *worker.blocks]},
        {"is_shared": True},
    ]
    good = worker.push(0, 0)
    return [
        *((msgspec.structs.replace(good, **change), rows) for change in wrong),
        (good, []),
        (good, [*rows, rows[0]]),
        (good, [row[:-1] for row in rows]),
        (good, [row.double() for row in rows]),
        (good, [torch.zeros(length + 1) for _ in rows]),
    ]


@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_push_that_is_wrong_is_refused(bound: int | None) -> None:
    server, (worker, other) = meet(bound)
    push_all(server, other, 0, 1.0)
    for message, rows in bent_pushes(worker):
        refusal(server, worker, message, rows)


WRONG_APPLIES = [
    {"batch": 1},
    {"batch": HUGE},
    {"batch": -1},
    {"first": 1},
    {"first": -1},
    {"last": 0},
    {"last": HUGE},
    {"first": -HUGE, "last": HUGE},
    {"scale": math.nan},
    {"scale": math.inf},
    {"factor": math.nan},
    {"factor": 0.0},
    {"factor": -1.0},
    {"settings": []},
    {"settings": [{"lr": 0.1}] * 2},
    {"settings": [{"lr": math.nan}]},
    {"settings": [{"lr": math.inf}]},
    {"settings": [{"lr": "fast"}]},
    {"settings": [{"lr": None}]},
    {"settings": [{"lr": [0.1]}]},
    {"settings": [{"lr": {"a": 1}}]},
    {"settings": [{"betas": [0.9]}]},
    {"settings": [{"betas": 0.9}]},
    {"settings": [{"betas": [0.9, math.nan]}]},
    {"settings": [{"weight_decay": True}]},
    {"settings": [{"amsgrad": 3}]},
    {"settings": [{"lr": 0.5, "params": []}]},
    {"settings": [{"lr": 0.5, "new": {"a": 1}}]},
    {"settings": [{"lr": 0.5, "new": math.nan}]},
]


@pytest.mark.parametrize("bound", [0, 1, None])
def test_an_apply_that_is_wrong_is_refused(bound: int | None) -> None:
    server, workers = meet(bound)
    for worker in workers:
        push_all(server, worker, 0, 1.0)
    worker = workers[0]
    for wrong in WRONG_APPLIES:
        refusal(server, worker, worker.apply(**{"batch": 0} | wrong))
    assert isinstance(only(send(server, worker, worker.apply(0))), PulledParameters)


@pytest.mark.parametrize("wrong", [{"batch": 2}, {"batch": -1}, {"first": 2}, {"last": HUGE}])
@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_sum_that_is_wrong_is_refused(bound: int | None, wrong: dict[str, Any]) -> None:
    server, (worker, _) = meet(bound)
    push_all(server, worker, 0, 1.0)
    refusal(server, worker, worker.sum(**{"batch": 0} | wrong))


@pytest.mark.parametrize("batch", [-1, 1, 5, HUGE])
@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_pull_of_a_batch_nobody_can_have_come_to_is_refused(bound, batch: int) -> None:
    server, (worker, _) = meet(bound)
    refusal(server, worker, worker.pull(batch))


Frames = list[bytes | Tensor]


def dumped(server: Server, worker: Worker) -> Frames:
    """The state of a server, with every tensor changed."""
    (answer,) = send(server, worker, worker.make(DumpState))
    assert isinstance(answer.message, DumpedState)
    state = unpack_state([memoryview(bytes_of(frame)) for frame in answer.payload])
    for part in (part for parts in state.tensors.values() for part in parts):
        part.tensor.add_(1)
    return pack_state(state)


def broken_states(server: Server, worker: Worker) -> list[tuple[LoadState, Frames]]:
    packed, *tensors = dumped(server, worker)
    assert isinstance(packed, bytes)
    plain, entries = msgspec.msgpack.decode(packed)

    def bent(change: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode((plain, [entries[0] | change, *entries[1:]]))

    def load(content: bytes, frames: Frames, step: int = 4) -> tuple[LoadState, Frames]:
        return worker.make(LoadState, step=step), [content, *frames]

    other = copy.deepcopy(plain) | {"optimizer": "SGD"}
    return [
        (worker.make(LoadState, step=4), []),
        load(packed, tensors, step=-1),
        load(b"", tensors),
        load(b"\xc1", tensors),
        load(packed, []),
        load(packed, tensors[:-1]),
        load(packed, [*tensors, tensors[0]]),
        load(packed, [torch.zeros(3), *tensors[1:]]),
        load(packed[:-3], tensors),
        load(bent({"dtype": "nonsense"}), tensors),
        load(bent({"dtype": "float64"}), tensors),
        load(bent({"name": "model.other"}), tensors),
        load(bent({"offset": [3]}), tensors),
        load(bent({"shape": [-1]}), tensors),
        load(msgspec.msgpack.encode((other, entries)), tensors),
        load(msgspec.msgpack.encode(({}, entries)), tensors),
    ]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    server, workers = meet()
    for worker in workers:
        push_all(server, worker, 0, 1.0)
    send(server, workers[0], workers[0].apply(0))
    for load, tensors in broken_states(server, workers[0]):
        refusal(server, workers[0], load, tensors)


def test_a_state_is_taken_over_once() -> None:
    server, (worker, _) = meet(seats=2, pieces=2)
    tensors, load = dumped(server, worker), worker.make(LoadState, step=4)
    assert isinstance(only(send(server, worker, load, tensors)), Acknowledged)
    assert server.clock.committed == 4 and torch.equal(values(server), torch.ones(47))
    server.clock.apply(4, range(2))
    assert isinstance(only(send(server, worker, load, tensors)), Acknowledged)
    assert server.clock.committed == 5, "a message that came late undid what followed"


# ---- anything at all

NUMBERS = st.integers(-2, 4) | st.sampled_from([HUGE, -HUGE, 2**31, 1 << 20])
FLOATS = st.floats() | st.sampled_from([1.0, 0.5, -1.0])
BLOCKS = st.lists(st.builds(Block, NUMBERS, NUMBERS), max_size=3) | st.sampled_from(
    [[Block(0, 1)], [Block(1, 1), Block(2, 1)], [Block(1, 2)]]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
NAMES = st.sampled_from(["lr", "betas", "eps", "amsgrad", "foreach", "params", "maximize", "new"])
SETTINGS = st.lists(st.dictionaries(NAMES, ANYTHING, max_size=3), max_size=2)
HEAD = {"generation": st.sampled_from([GENERATION] * 9 + [GENERATION - 1]), "request": NUMBERS}
WHICH = {"batch": NUMBERS, "attempt": NUMBERS, "first": NUMBERS, "last": NUMBERS}
MESSAGES = st.one_of(
    st.builds(
        WorkerHello,
        **HEAD,
        seat=NUMBERS,
        secret=st.sampled_from([SECRET, "other"]),
        layout=st.sampled_from([make_server().layout.digest, ""]),
        num_rows=NUMBERS,
        rows=st.none(),
    ),
    st.builds(
        Push,
        **HEAD,
        batch=NUMBERS,
        attempt=NUMBERS,
        key=NUMBERS,
        blocks=BLOCKS,
        touched=st.lists(st.booleans(), max_size=3),
        is_shared=st.booleans(),
    ),
    st.builds(
        Pushes,
        **HEAD,
        pushes=st.just([Worker(0, make_server(seats=2, pieces=3)).push(0, 0)] * 2),
        counts=st.lists(NUMBERS, max_size=3),
    ),
    st.builds(Sum, **HEAD, **WHICH, want_norms=st.booleans(), want_finite=st.booleans()),
    st.builds(
        Apply,
        **HEAD,
        **WHICH,
        scale=FLOATS,
        factor=FLOATS,
        pulled=st.none() | NUMBERS,
        settings=SETTINGS | st.just([{"lr": 0.1}]),
    ),
    st.builds(Pull, **HEAD, batch=NUMBERS, meets=st.booleans(), waits=st.booleans()),
    st.builds(AskHalt, **HEAD, batch=NUMBERS),
    st.builds(CheckRequest, **HEAD, turn=NUMBERS),
    st.builds(DumpState, **HEAD, gradients=st.booleans()),
    st.builds(LoadState, **HEAD, step=NUMBERS),
)
FRAMES = st.lists(st.sampled_from([0, 1, 28, 32, 160, 256]).map(bytearray), max_size=3)


@given(
    st.sampled_from([0, 1, None]),
    st.lists(st.tuples(st.integers(0, 2), MESSAGES, FRAMES), min_size=1, max_size=25),
)
def test_any_message_is_answered_or_refused(bound: int | None, sent) -> None:
    server, workers = meet(bound)
    stranger = Worker(0, server)
    stranger.name = b"stranger"
    for worker in workers:
        push_all(server, worker, 0, 1.0)
    for who, message, frames in sent:
        name, before = [*workers, stranger][who].name, all_of(server)
        answers = server.handle(name, message, [memoryview(frame) for frame in frames])
        for answer in answers:
            if isinstance(answer.message, RequestRefused):
                assert answer.to == name and answer.message.why
                # Pushes that come together are refused one by one, and the others kept.
                if not isinstance(message, Pushes):
                    assert len(answers) == 1 and all_of(server) == before
            elif answer.to != name:
                assert isinstance(answer.message, Summed | PulledParameters)
        # A push may be the last that a step waits for.
        if not isinstance(message, Apply | LoadState | Push | Pushes):
            assert before.startswith(tensor_bytes(server)), "parameters were changed"
        assert len(server._waiting) <= 3 * len(server.sessions), "waiting costs memory"
        assert len(server._rows._batches) <= 2 + (bound or 0), "rows cost memory"


# ---- what comes twice, late, or in shared memory


def test_an_apply_that_comes_twice_is_made_once() -> None:
    server, (worker,) = meet(seats=1, pieces=1)
    push_all(server, worker, 0, 1.0)
    apply = worker.apply(0)
    assert isinstance(only(send(server, worker, apply)), PulledParameters)
    before = state_bytes(server)
    assert isinstance(only(send(server, worker, apply)), PulledParameters)
    push_all(server, worker, 0, 1.0)
    assert isinstance(only(send(server, worker, worker.apply(0))), PulledParameters)
    assert state_bytes(server) == before


def test_pushes_come_together_and_each_with_its_frames() -> None:
    server, (worker, _) = meet()
    keys = server.shard.keys
    pushes = [worker.push(key, 0) for key in keys]
    rows = [worker.rows(key, 1.0) for key in keys]
    everything = [row for own in rows for row in own]
    good = [len(own) for own in rows]
    for counts in (good[:-1], [*good[:-1], 0], [*good, -1], [-1, *good[1:]], []):
        refusal(server, worker, worker.make(Pushes, pushes=pushes, counts=counts), everything)
    assert not send(server, worker, worker.make(Pushes, pushes=pushes, counts=good), everything)
    assert not server._rows.missing(0, worker.pieces, 0)


def test_a_step_is_made_when_the_last_rows_have_come_and_all_are_told() -> None:
    server, (worker, other) = meet()
    push_all(server, worker, 0, 1.0)
    assert not send(server, worker, worker.apply(0)) and not server.clock.committed
    *keys, last = server.shard.keys
    for key in keys:
        assert not send(server, other, other.push(key, 0), other.rows(key, 1.0))
    answers = send(server, other, other.push(last, 0), other.rows(last, 1.0))
    assert isinstance(only(answers), PulledParameters) and answers[0].to == worker.name
    assert server.clock.committed == 1
    before = state_bytes(server)
    assert isinstance(only(send(server, other, other.apply(0))), PulledParameters)
    assert state_bytes(server) == before


def test_rows_that_did_not_come_are_asked_for() -> None:
    server, (worker, other) = meet()
    push_all(server, other, 0, 1.0)
    for question in (worker.sum(0), worker.apply(0)):
        missing = only(send(server, worker, question))
        assert isinstance(missing, MissingRows) and missing.keys == server.shard.keys
    push_all(server, worker, 0, 1.0)
    assert isinstance(only(send(server, worker, worker.sum(0))), Summed)


def test_a_late_question_takes_no_place_of_a_newer_one() -> None:
    server, (worker, other) = meet()
    push_all(server, worker, 0, 1.0)
    old, new = worker.sum(0), worker.sum(0)
    assert not send(server, worker, new) and not send(server, worker, old)
    answers = []
    for key in server.shard.keys:
        answers += send(server, other, other.push(key, 0), other.rows(key, 1.0))
    assert [answer.message.request for answer in answers] == [new.request]


def test_a_pull_that_comes_twice_does_not_overwrite_the_next_gradients() -> None:
    """Out of lockstep parameters are put where the worker's rows are, and rows are what follows."""
    server = make_server(seats=2, pieces=2, bound=None)
    worker = Worker(0, server)
    segment = SharedSegment.create(server.layout.row_places(1)[-1])
    assert only(send(server, worker, worker.hello(rows=segment.place))).is_shared
    pull = worker.pull(0)
    segment.bytes.fill_(7)
    assert isinstance(only(send(server, worker, pull)), PulledParameters)
    assert not segment.bytes[:160].any(), "the parameters are zeros"
    segment.bytes.fill_(7)  # the gradients of the batch
    assert isinstance(only(send(server, worker, pull)), PulledParameters), (
        "the answer may have been lost"
    )
    assert segment.bytes.eq(7).all()
    server.sessions.clear()
    segment.close()


def test_a_parameter_is_stepped_on_where_its_own_worker_touched_it() -> None:
    server, workers = meet(bound=None, seats=2, pieces=2)
    key = server.shard.keys[0]
    untouched = [False] * len(server.layout.segments(key))
    send(server, workers[0], workers[0].push(key, 0, touched=untouched), workers[0].rows(key, 0))
    for other in server.shard.keys[1:]:
        send(server, workers[0], workers[0].push(other, 0), workers[0].rows(other, 1))
    push_all(server, workers[1], 0, 1.0)
    assert isinstance(only(send(server, workers[0], workers[0].apply(0))), PulledParameters)
    stepped = [bool(server.shard.values[k].any()) for k in server.shard.keys]
    assert stepped == [False] + [True] * (len(stepped) - 1)


# ---- staleness


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_the_fast_wait_for_the_slow_at_the_bound_and_not_before(bound: int | None) -> None:
    server, (slow, fast) = meet(bound, pieces=2)
    seen = []
    for batch in range(10):
        push_all(server, fast, batch, 1.0)
        assert bound != 0 or not send(server, fast, fast.sum(batch)), "of the slow one's pieces too"
        answers = send(server, fast, fast.apply(batch))
        if not answers:
            break
        values_ = only(answers)
        assert isinstance(values_, PulledParameters)
        seen.append(batch + 1 - values_.committed)
    assert seen == list(range(1, 11 if bound is None else bound + 1))
    if bound:  # the slow one is done with its first: the fast one gets what it waits for
        push_all(server, slow, 0, 1.0)
        answers = send(server, slow, slow.apply(0))
        assert {answer.to for answer in answers} == {slow.name, fast.name}
        (given_,) = [a.message for a in answers if a.to == fast.name]
        assert isinstance(given_, PulledParameters) and given_.committed == 1


@pytest.mark.parametrize("bound", [1, 2, None])
def test_workers_of_any_speed_keep_the_bound(bound: int | None) -> None:
    draws = torch.Generator().manual_seed(5)
    server, workers = meet(bound, seats=3, pieces=3)
    at, waits, largest = [0, 0, 0], [False] * 3, 0
    for _ in range(400):
        who = int(torch.multinomial(torch.tensor([1.0, 5.0, 20.0]), 1, generator=draws))
        if waits[who]:
            continue
        worker, batch = workers[who], at[who]
        push_all(server, worker, batch, 1.0)
        at[who], waits[who] = batch + 1, True
        answers = send(server, worker, worker.apply(batch))
        for answer in answers:
            if isinstance(answer.message, PulledParameters):
                seat = [w.name for w in workers].index(answer.to)
                waits[seat] = False
                largest = max(largest, at[seat] - answer.message.committed)
    assert largest == bound if bound is not None else largest > 10


def test_who_asks_late_is_told_of_the_attempt_that_others_gave_up() -> None:
    """One worker may know that a sum is not finite, and push again, before the other has asked."""
    server, (first, second) = meet()
    push_all(server, first, 0, math.inf)
    push_all(server, second, 0, 1.0)
    (told,) = send(server, first, first.sum(0))
    assert isinstance(told.message, Summed) and not told.message.finite
    push_all(server, first, 0, 2.0, attempt=1)
    (late,) = send(server, second, second.sum(0))
    assert isinstance(late.message, Summed) and not late.message.finite
    push_all(server, second, 0, 1.0, attempt=1)
    (again,) = send(server, second, second.sum(0, attempt=1))
    assert isinstance(again.message, Summed) and again.message.finite


@pytest.mark.parametrize("meets", [True, False])
def test_a_newcomer_ahead_of_the_others_need_not_wait_for_parameters(meets: bool) -> None:
    server, (fast, slow) = meet(bound=1, pieces=2)
    for batch in range(2):
        push_all(server, fast, batch, 1.0)
        send(server, fast, fast.apply(batch))
    newcomer = Worker(0, server)
    newcomer.name = b"newcomer"
    server._begun = 0  # as if the server were new, too
    welcome = only(send(server, newcomer, newcomer.hello()))
    assert isinstance(welcome, ServerWelcome) and welcome.next_batch == 2
    given = only(send(server, newcomer, newcomer.pull(2, meets, waits=False)))
    assert isinstance(given, PulledParameters) and given.committed == 0
    send(server, slow, slow.make(AskHalt, batch=0))
    assert server._halt is not None and server._halt.step > 2
    assert not send(server, newcomer, newcomer.pull(2, meets))
    for batch in range(2):
        push_all(server, slow, batch, 1.0)
        answers = send(server, slow, slow.apply(batch))
        came = [a.message for a in answers if a.to == newcomer.name]
        assert [isinstance(message, PulledParameters) for message in came] == [True] * (
            batch == meets
        )


@pytest.mark.parametrize("for_good", [True, False])
@pytest.mark.parametrize("num_ahead", [2, 5])
def test_who_holds_up_a_halt_is_told(monkeypatch, num_ahead: int, for_good: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(core, "warn_on_screen", said.append)
    server, (fast, slow) = meet(bound=None, pieces=2)
    for batch in range(num_ahead):
        push_all(server, fast, batch, 1.0)
        send(server, fast, fast.apply(batch))
    send(server, slow, slow.make(AskHalt, batch=0, for_good=for_good))
    assert server._halt == Halt(num_ahead + 2, for_good)
    assert len(said) == (num_ahead > 3)
    if said:
        assert "Rank 1 is 5 batches behind" in said[0]
        assert ("A second Ctrl-C" in said[0]) == for_good
