"""`server`: push and pull of 100 MB through one parameter server, against what else there is.

In a round the worker has 100 MB of gradients in ten ordinary tensors; the server, a process of its
own on the same host, makes an SGD step on them; afterwards the parameters of the worker's model are
the new ones, wherever they stand. Nothing is computed, so nothing hides the traffic. Three of
Shoal's ways: `shared`, in memory that both see, as it is on one host; `frames`, over a socket with
checksums, as between hosts; `journal`, shared and with each update written down before it is
answered, as in a run of `shoal train` without copies.

The peers, all in the same rounds and each with as few copies as it allows: a remote object of torch
RPC (TensorPipe), a Ray actor that is given arrays, which it moves without a copy (if Ray can be
imported; Shoal does not depend on it), and ZeroMQ alone, which sends the frames back as they came,
unchecked and without a step. None of them copies what came into the old parameters: the model is
given the tensors that arrived. Figures are taken against the fastest peer of the run, that of
`frames` against ZeroMQ. The ceiling is a copy of the gradients and a step on them, in one process.
Nothing is pinned, since RPC works with several threads; each process has one torch thread.

Where the time of `shared` goes, by the smallest figure of each part on two cores that others used
too: 12 to 15 ms for the worker's copy of gradients into rows that the server reads, beside which it
copies the old parameters into its other set; 12 to 14 ms for the step, in which the
worker waits; about 2 ms for 33 messages. The pull is a change of pointers. The step cannot begin
before all have voted on the gradients, so copy and step do not overlap, and the ceiling stands for
what is left.
"""

import importlib.util
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed.rpc as rpc
import zmq
from torch import Tensor, nn

from bench import harness, serving
from bench.harness import Row
from shoal.comm.collectives import Group
from shoal.comm.shared_memory import NotShared, Segment
from shoal.comm.wire import bytes_of, tensor_of
from shoal.mesh import Mesh
from shoal.sync.server.strategy import ThroughServers
from shoal.sync.strategy import Tally

NUM_TENSORS, LENGTH = 10, 2_500_000
RATE = 0.125
# The last two are what checksums and writing may cost, set from first runs: they guard, no more.
FLOORS = {"shared": 3.0, "frames": 0.6, "journal": 0.2}
NAMES = {"rpc": "torch RPC", "ray": "a Ray actor", "zmq": "plain ZeroMQ"}


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
        echo()
    else:
        model = Weights()
        journal = Path(words[0]) if words else None
        serving.serve(model, sgd(model), num_pieces=1, bound=0, journal=journal)


def serve_rpc(address: str) -> None:
    serving.say(address)
    join_rpc(address, "server", 1)
    rpc.shutdown()


def echo() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as door:
        port = door.bind_to_random_port("tcp://127.0.0.1")
        serving.say(f"tcp://127.0.0.1:{port}")
        parent = os.getppid()
        while os.getppid() == parent:
            if door.poll(100):
                door.send_multipart(door.recv_multipart(copy=False), copy=False)


def join_rpc(address: str, name: str, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=address)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


# ---- in the worker, a context and a round for each arm


@contextmanager
def through_shoal(
    gradients: Sequence[Tensor], arm: str, *words: str
) -> Iterator[Callable[[], Sequence[Tensor]]]:
    model = Weights()
    parameters = list(model.parameters())
    strategy = ThroughServers(1, 0)
    with ExitStack() as stack:
        address = stack.enter_context(serving.started("bench.server", arm, *words))
        servers = serving.reached_at(address)
        mesh = Mesh(Group(), Group(), Group(), Group(), "cpu", servers=servers)
        with ExitStack() as attaching:
            if arm == "frames":  # as on two hosts
                refused = NotShared("The bench sends frames.")
                attaching.enter_context(mock.patch.object(Segment, "create", side_effect=refused))
            strategy.attach(model, sgd(model), mesh)
        stack.callback(strategy.detach)

        def round_() -> Sequence[Tensor]:
            with strategy.microbatch(True, True):
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
            tally = Tally()
            tally.add(torch.tensor(1.0), 1.0, True)
            strategy.exchange(tally, want_norm=False)
            strategy.update(1.0, check=False)
            return parameters

        yield round_


@contextmanager
def through_rpc(gradients: Sequence[Tensor]) -> Iterator[Callable[[], Sequence[Tensor]]]:
    model = Weights()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving.started("bench.server", "rpc", f"tcp://127.0.0.1:{port}") as address:
        join_rpc(address, "worker", 0)
        held = rpc.remote("server", Held)

        def round_() -> Sequence[Tensor]:
            new = held.rpc_sync(timeout=60).step(gradients)
            for p, value in zip(model.parameters(), new, strict=True):
                p.data = value
            return list(model.parameters())

        yield round_
        rpc.shutdown()


@contextmanager
def through_zmq(gradients: Sequence[Tensor]) -> Iterator[Callable[[], Sequence[Tensor]]]:
    model = Weights()
    with (
        serving.started("bench.server", "zmq") as address,
        zmq.Context() as context,
        context.socket(zmq.REQ) as line,
    ):
        line.connect(address)

        def round_() -> Sequence[Tensor]:
            line.send_multipart([bytes_of(g) for g in gradients], copy=False)
            for p, frame in zip(model.parameters(), line.recv_multipart(copy=False), strict=True):
                p.data = tensor_of(frame.buffer, torch.float32, LENGTH)
            return []

        yield round_


@contextmanager
def through_ray(gradients: Sequence[Tensor]) -> Iterator[Callable[[], Sequence[Tensor]]]:
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
        held = ray.remote(Held).remote()

        def round_() -> Sequence[Tensor]:
            sent = held.step_on_arrays.remote([g.numpy() for g in gradients])
            for p, value in zip(model.parameters(), ray.get(sent), strict=True):
                p.data = torch.from_numpy(value)
            return list(model.parameters())

        yield round_
    finally:
        ray.shutdown()


@contextmanager
def in_one_process(gradients: Sequence[Tensor]) -> Iterator[Callable[[], Sequence[Tensor]]]:
    between, held = torch.zeros(NUM_TENSORS, LENGTH), Held()

    def round_() -> Sequence[Tensor]:
        for row, gradient in zip(between, gradients, strict=True):
            row.copy_(gradient)
        held.step(list(between))
        return held.parameters

    yield round_


def timed(round_: Callable[[], Sequence[Tensor]]) -> float:
    started = perf_counter()
    round_()
    return perf_counter() - started


def check(arm: str, round_: Callable[[], Sequence[Tensor]], gradients: Sequence[Tensor]) -> None:
    """An arm that steps wrongly is not fast."""
    for p, gradient in zip(round_(), gradients, strict=False):
        if not torch.equal(p.detach(), -RATE * gradient):
            raise RuntimeError(f"{arm}: the parameters are not those of one step.")


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # Ray's store
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gradients = [torch.randn(LENGTH) for _ in range(NUM_TENSORS)]
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        arms = {
            "shared": through_shoal(gradients, "shared"),
            "frames": through_shoal(gradients, "frames"),
            "journal": through_shoal(gradients, "journal", f"{place}/journal"),
            "rpc": through_rpc(gradients),
            "zmq": through_zmq(gradients),
            "ceiling": in_one_process(gradients),
        }
        if importlib.util.find_spec("ray") is not None:
            arms["ray"] = through_ray(gradients)
        rounds = {arm: stack.enter_context(opened) for arm, opened in arms.items()}
        for arm, round_ in rounds.items():
            check(arm, round_, gradients)
        rounds["again"] = rounds["rpc"]
        measured = {arm: partial(timed, round_) for arm, round_ in rounds.items()}
        with harness.quiet():
            seconds = harness.interleave(measured, 5 if quick else 20, num_warm_up=2)
    for arm in FLOORS:
        yield _row(arm, seconds)


def _row(arm: str, seconds: dict[str, list[float]]) -> Row:
    took = {name: 1e3 * harness.spread(figures).median for name, figures in seconds.items()}
    peers = {name: took[name] for name in NAMES if name in took}
    best = "zmq" if arm == "frames" else min(peers, key=peers.__getitem__)
    against = harness.spread(harness.ratios(seconds[best], seconds[arm]))
    control = harness.spread(harness.ratios(seconds["again"], seconds["rpc"])).median
    others = [f"{NAMES[name]} {ms:.0f} ms" for name, ms in peers.items() if name != best]
    if "ray" not in peers:
        others.append("no Ray here")
    return Row(
        name=f"server/{arm}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOORS[arm],
        peer=f"{NAMES[best]} {took[best]:.0f} ms",
        ceiling=f"a copy and a step {took['ceiling']:.0f} ms",
        control=control,
        note=f"Shoal {took[arm]:.0f} ms; {', '.join(others)}",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        harness.main(measure)
