"""`server`: push and pull of 100 MB through one parameter server, against what else there is.

In a round the worker has 100 MB of gradients in ten ordinary tensors; the server, a process of its
own on the same host, makes an SGD step on them; afterwards the parameters of the worker's model are
the new ones, wherever they stand. Nothing is computed, so nothing hides the traffic. Three of
Shoal's ways: `shared`, in memory that both see, as it is on one host; `frames`, over a socket with
checksums, as between hosts; `journal`, shared and with each update written down before it is
answered, as in a run of `shoal train` without copies.

The peers are a remote object of torch RPC (TensorPipe), a Ray actor (if Ray can be imported; Shoal
does not depend on it) and a pair of ZeroMQ sockets, all in the same rounds, each written twice:

- *plain*, as one writes it first: lists of torch tensors are given to a call and come back from it
  (over ZeroMQ lists of arrays, with `send_pyobj`), and what came is copied into the parameters of
  the model. `shared` and `journal` are measured against the fastest of these.
- *tuned*, with as few copies as each allows: the model is given the tensors that arrived, Ray gets
  arrays, which it moves without a copy, and ZeroMQ sends the frames back as they came, unchecked
  and without a step. `frames` is measured against ZeroMQ so, and `shared` against the fastest so in
  a row of its own, `tuned`.

All but tuned ZeroMQ end in the same state, which is checked: a step was made, and the worker's own
model has the new parameters. The ceiling is a copy of the gradients and a step on them, in one
process. Nothing is pinned, since RPC works with several threads; each process has one torch thread,
but for Shoal's server, which steps with the cores of whoever waits for it, as in a run. Worker and
server of each arm are processes of their own, which stand still while another arm is measured
(`bench/apart.py`): those of RPC fill both cores when nobody asks anything of them.

Where the time of `shared` goes: to the worker's copy of gradients into rows that the server reads,
beside which that copies the old parameters into its other set; and to the step, in which the worker
waits. Messages take little: eleven, of which one is answered. That answer is the pull, a change of
pointers. A gradient could stand in the row from the start, but autograd would then have to add it
to zeros there, which is more traffic than the copy of one that it made elsewhere.
"""

import importlib.util
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed.rpc as rpc
import zmq
from torch import Tensor, nn

from bench import apart, harness, serving
from bench.harness import Row
from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.comm.shared_memory import NotShared, SharedSegment
from shoal.comm.wire import bytes_of, tensor_of
from shoal.sync.server.strategy import ServerStrategy
from shoal.sync.strategy import LocalStep

NUM_TENSORS, LENGTH = 10, 2_500_000
RATE = 0.125
CHUNK = 10  # rounds at a time, of which the first find everything cold
# All but the first are set from first runs: they guard, no more.
FLOORS = {"shared": 3.0, "tuned": 1.0, "frames": 0.45, "journal": 0.5}
TUNED = {"rpc": "torch RPC", "ray": "a Ray actor", "zmq": "ZeroMQ"}
PLAIN = {f"{peer}-plain": name for peer, name in TUNED.items()}
AGAINST = {"shared": list(PLAIN), "tuned": list(TUNED), "frames": ["zmq"], "journal": list(PLAIN)}

Round = Callable[[], Sequence[Tensor]]  # the new parameters, if they are to be checked


class Weights(nn.Module):
    """100 MB, all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(LENGTH) for _ in range(NUM_TENSORS))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, fused=True)


class Held:
    """Parameters with an optimizer, at the other end of RPC or in an actor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = Weights()
        self.parameters = list(self.model.parameters())
        self.optimizer = sgd(self.model)

    def step(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        self.optimizer.step()
        return [p.detach() for p in self.parameters]

    def step_on_arrays(self, gradients: Sequence[Any]) -> list[Any]:
        return [new.numpy() for new in self.step([torch.from_numpy(g) for g in gradients])]


# ---- in processes that serve


def serve(arm: str, *words: str) -> None:
    torch.set_num_threads(1)
    if arm == "rpc":
        serve_rpc(*words)
    elif arm == "zmq":
        answer_each(lambda door: door.send_multipart(door.recv_multipart(copy=False), copy=False))
    elif arm == "zmq-plain":
        held = Held()
        answer_each(lambda door: door.send_pyobj(held.step_on_arrays(door.recv_pyobj())))
    else:
        model = Weights()
        journal = Path(words[0]) if words else None
        serving.serve(model, sgd(model), num_pieces=1, bound=0, journal=journal)


def serve_rpc(address: str) -> None:
    serving.say(address)
    join_rpc(address, "server", 1)
    rpc.shutdown()


def answer_each(answer: Callable[[zmq.Socket[bytes]], object]) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as door:
        port = door.bind_to_random_port("tcp://127.0.0.1")
        serving.say(f"tcp://127.0.0.1:{port}")
        while True:
            answer(door)


def join_rpc(address: str, name: str, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=address)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


# ---- in the worker, a context and a round for each arm


def give(model: nn.Module, new: Sequence[Tensor]) -> Sequence[Tensor]:
    """Let the parameters be what came."""
    for p, value in zip(model.parameters(), new, strict=True):
        p.data = value
    return list(model.parameters())


@torch.no_grad()
def copy(model: nn.Module, new: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy what came into the parameters."""
    for p, value in zip(model.parameters(), new, strict=True):
        p.copy_(value)
    return list(model.parameters())


@contextmanager
def through_shoal(gradients: Sequence[Tensor], arm: str, *words: str) -> Iterator[dict[str, Round]]:
    model = Weights()
    parameters = list(model.parameters())
    strategy = ServerStrategy(1, 0)
    with ExitStack() as stack:
        address = stack.enter_context(serving.started("bench.server", arm, *words))
        servers = serving.reached_at(address)
        mesh = Mesh(Group(), Group(), Group(), Group(), "cpu", servers=servers)
        with ExitStack() as attaching:
            if arm == "frames":  # as on two hosts
                refused = NotShared("The bench sends frames.")
                attaching.enter_context(
                    mock.patch.object(SharedSegment, "create", side_effect=refused)
                )
            strategy.attach(model, sgd(model), mesh)
        stack.callback(strategy.detach)

        def round_() -> Sequence[Tensor]:
            with strategy.microbatch(True, True):
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
            tally = LocalStep()
            tally.add(torch.tensor(1.0), 1.0, True)
            strategy.exchange(tally, want_norm=False)
            strategy.update(1.0, check=False)
            return parameters

        yield {arm: round_}


@contextmanager
def through_journal(gradients: Sequence[Tensor]) -> Iterator[dict[str, Round]]:
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        yield stack.enter_context(through_shoal(gradients, "journal", f"{place}/journal"))


@contextmanager
def through_rpc(gradients: Sequence[Tensor]) -> Iterator[dict[str, Round]]:
    model = Weights()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving.started("bench.server", "rpc", f"tcp://127.0.0.1:{port}") as address:
        join_rpc(address, "worker", 0)
        held, own = rpc.remote("server", Held), rpc.remote("server", Held)
        yield {
            "rpc": lambda: give(model, held.rpc_sync(timeout=60).step(gradients)),
            "rpc-plain": lambda: copy(model, own.rpc_sync(timeout=60).step(gradients)),
        }
        rpc.shutdown()


@contextmanager
def through_zmq(gradients: Sequence[Tensor], arm: str) -> Iterator[dict[str, Round]]:
    model = Weights()
    with (
        serving.started("bench.server", arm) as address,
        zmq.Context() as context,
        context.socket(zmq.REQ) as line,
    ):
        line.connect(address)

        def tuned() -> Sequence[Tensor]:
            line.send_multipart([bytes_of(g) for g in gradients], copy=False)
            frames = line.recv_multipart(copy=False)
            give(model, [tensor_of(frame.buffer, torch.float32, LENGTH) for frame in frames])
            return []

        def plain() -> Sequence[Tensor]:
            line.send_pyobj([g.numpy() for g in gradients])
            return copy(model, [torch.from_numpy(value) for value in line.recv_pyobj()])

        yield {arm: tuned if arm == "zmq" else plain}


@contextmanager
def through_ray(gradients: Sequence[Tensor]) -> Iterator[dict[str, Round]]:
    import ray  # type: ignore[import-not-found]

    model = Weights()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=700_000_000,
    )
    try:
        held, own = ray.remote(Held).remote(), ray.remote(Held).remote()

        def tuned() -> Sequence[Tensor]:
            new = ray.get(held.step_on_arrays.remote([g.numpy() for g in gradients]))
            return give(model, [torch.from_numpy(value) for value in new])

        yield {
            "ray": tuned,
            "ray-plain": lambda: copy(model, ray.get(own.step.remote(gradients))),
        }
    finally:
        ray.shutdown()


@contextmanager
def in_one_process(gradients: Sequence[Tensor]) -> Iterator[dict[str, Round]]:
    between, held = torch.zeros(NUM_TENSORS, LENGTH), Held()

    def round_() -> Sequence[Tensor]:
        for row, gradient in zip(between, gradients, strict=True):
            row.copy_(gradient)
        held.step(list(between))
        return held.parameters

    yield {"ceiling": round_}


def timed(round_: Round) -> float:
    """Seconds a round, the median of some: a worker that trains makes one after another."""
    took = []
    for _ in range(CHUNK):
        started = perf_counter()
        round_()
        took.append(perf_counter() - started)
    return harness.spread(took).median


def check(arm: str, round_: Round, gradients: Sequence[Tensor]) -> None:
    """An arm that steps wrongly is not fast."""
    for p, gradient in zip(round_(), gradients, strict=False):
        if not torch.equal(p.detach(), -RATE * gradient):
            raise RuntimeError(f"{arm}: the parameters are not those of one step.")


def work(which: str) -> None:
    """Be the worker of some arms."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # Ray's store
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gradients = [torch.randn(LENGTH) for _ in range(NUM_TENSORS)]
    with SETS[which](gradients) as rounds, harness.quiet():
        for arm, round_ in rounds.items():
            check(arm, round_, gradients)
        apart.serve({arm: partial(timed, round_) for arm, round_ in rounds.items()})


SETS: dict[str, Callable[..., AbstractContextManager[dict[str, Round]]]] = {
    "shared": partial(through_shoal, arm="shared"),
    "frames": partial(through_shoal, arm="frames"),
    "journal": through_journal,
    "rpc": through_rpc,
    "zmq": partial(through_zmq, arm="zmq"),
    "zmq-plain": partial(through_zmq, arm="zmq-plain"),
    "ceiling": in_one_process,
    "ray": through_ray,
}


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    is_here = importlib.util.find_spec("ray") is not None
    sets = [("work", which) for which in SETS if which != "ray" or is_here]
    with apart.started("bench.server", sets) as arms:
        arms["again"] = arms["rpc-plain"]
        seconds = harness.interleave(arms, 5 if quick else 20, num_warm_up=1)
    for name in FLOORS:
        yield _row(name, seconds)


def _row(name: str, seconds: dict[str, list[float]]) -> Row:
    arm = "shared" if name == "tuned" else name
    took = {name: 1e3 * harness.spread(figures).median for name, figures in seconds.items()}
    best = min((peer for peer in AGAINST[name] if peer in took), key=took.__getitem__)
    against = harness.spread(harness.ratios(seconds[best], seconds[arm]))
    control = harness.spread(harness.ratios(seconds["again"], seconds["rpc-plain"])).median
    others = {peer: took[peer] for peer in AGAINST[name] if peer in took and peer != best}
    told = [f"Shoal {took[arm]:.0f} ms"]
    told += [f"{(PLAIN | TUNED)[peer]} {ms:.0f} ms" for peer, ms in others.items()]
    told += [] if "ray" in took else ["no Ray here"]
    return Row(
        name=f"server/{name}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOORS[name],
        peer=f"{'plain' if best in PLAIN else 'tuned'} {(PLAIN | TUNED)[best]} {took[best]:.0f} ms",
        ceiling=f"a copy and a step {took['ceiling']:.0f} ms",
        control=control,
        note="; ".join(told),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    else:
        harness.main(measure)
