"""The process that talks to Ray, so that no other of a run loads it: `python -m` this module.

Ray starts threads, takes over SIGTERM and prints, and a supervisor must do none of that. So a
process of its own connects to the cluster, holds the placement group, and has an actor in each of
its bundles. An actor runs `shoal agent` as a fresh process, writes the invitation to it, and says
how it ended. The agent is killed when its actor dies, and the actors end with this process, which
ends with its standard input. Orders and answers: `ray_messages.py`; who gives them: `on_ray.py`.

Cost: a second to load and connect, beside the preparation of the run; then a turn each 0.1 s.
"""

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from shoal.cluster.agent_starter import AGENT_COMMAND
from shoal.cluster.ray_messages import (
    TO_RAY,
    AgentEnded,
    AskForAgents,
    ConnectedToRay,
    ConnectToRay,
    FromRay,
    NoRoom,
    RayFailed,
    RayNode,
    ToRay,
    encode_line,
)
from shoal.system.processes import describe_exit

TURN_S = 0.1
LOOK_S = 2.0  # between two looks at what waits for resources
ATTEMPTS = 5  # to start an agent, each of which ends with the node that it was given
TAIL_CHARACTERS = 600  # of what an agent printed last
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # which Ray sets for the command of a job
# An agent begins as this, which then becomes `shoal agent`: it must not outlive its actor.
_WITH_PARENT = (
    "import os, sys; from shoal.system.processes import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); "
    "os.execv(sys.executable, [sys.executable, '-P', *sys.argv[2:]])"
)


class HostActor:
    """In a worker of Ray. Its methods run in one thread, which lives as long as the worker: the
    kernel kills the agent when the thread that started it ends."""

    async def begin(self) -> None:
        """Does nothing: its caller knows that the actor runs."""

    async def run_agent(
        self, invitation: bytes, python: str, variables: dict[str, str]
    ) -> tuple[int, str]:
        """Run an agent to its end: its exit code, and what it printed last."""
        # Ray's own variables, a token among them, are no business of a recipe.
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own.pop("OMP_NUM_THREADS", None)  # Ray sets it
        with tempfile.TemporaryFile() as output:
            begin = [python or sys.executable, "-P", "-c", _WITH_PARENT, str(os.getpid())]
            agent = subprocess.Popen(
                [*begin, *AGENT_COMMAND],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=own | variables,
            )
            assert agent.stdin is not None
            with suppress(BrokenPipeError), agent.stdin:  # it ended at once
                agent.stdin.write(invitation)
            while (code := agent.poll()) is None:
                await asyncio.sleep(TURN_S)
            output.seek(0)
            return code, output.read().decode(errors="replace").strip()[-TAIL_CHARACTERS:]


def main() -> None:
    """Connect, then start agents as asked until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "wb") as nothing:  # Ray prints to both
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    # A signal to all processes of a command is for the supervisor; Ray would end at it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    orders: queue.Queue[ToRay | None] = queue.Queue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()

    def answer(message: FromRay) -> None:
        answers.write(encode_line(message))

    first = orders.get()
    if not isinstance(first, ConnectToRay):
        return
    try:
        answer(_connect(first))
        _Gang(answer).serve(orders)
    except BrokenPipeError:
        return
    # Ray raises errors of many kinds; all that is left to do is to say which.
    except Exception as error:  # noqa: BLE001
        with suppress(BrokenPipeError):
            answer(RayFailed(_words(error)))


def _read_orders(orders: "queue.Queue[ToRay | None]") -> None:
    for line in sys.stdin.buffer:
        orders.put(TO_RAY.decode(line))
    orders.put(None)


def _connect(order: ConnectToRay) -> ConnectedToRay:
    import ray

    probe(order.address, min(10.0, order.connect_timeout_s))
    _forget_working_directory()
    ray.init(
        address=order.address, log_to_driver=False, logging_level="ERROR", configure_logging=False
    )
    is_client = order.address.startswith("ray://")
    own = "" if is_client else ray.util.get_node_ip_address()
    head = order.address if is_client else ray.get_runtime_context().gcs_address
    return ConnectedToRay(own, head.removeprefix("ray://"), _nodes())


def probe(address: str, timeout_s: float) -> None:
    """Find out soon whether something listens there, since Ray tries for minutes."""
    name = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = name.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at {host}:{port}: {error}") from None


def _forget_working_directory() -> None:
    """A job of Ray hands its own working directory to all that it starts, which takes time on each
    node. Agents get their files from the run."""
    if (text := os.environ.get(_JOB_CONFIG)) is not None:
        config = msgspec.json.decode(text)
        if isinstance(config, dict) and isinstance(config.get("runtime_env"), dict):
            config["runtime_env"].pop("working_dir", None)
            os.environ[_JOB_CONFIG] = msgspec.json.encode(config).decode()


def _nodes() -> list[RayNode]:
    """The nodes that are alive. A client of Ray does not hear what is free on each: then all is."""
    import ray
    from ray._private.state import available_resources_per_node

    free = {} if ray.util.client.ray.is_connected() else available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [
        RayNode(
            node["NodeManagerAddress"],
            cpus := node["Resources"].get("CPU", 0.0),
            free[node["NodeID"]].get("CPU", 0.0) if node["NodeID"] in free else cpus,
        )
        for node in nodes
    ]


def _has_room(group: Any) -> bool:
    """Whether all bundles of a group are on nodes."""
    from ray.util.placement_group import placement_group_table

    return bool(placement_group_table(group).get("state") == "CREATED")


class _Bundle(NamedTuple):
    """A part of a placement group, for one agent at a time."""

    group: Any
    number: int
    cpus: float


class _RayAgent(NamedTuple):
    bundle: _Bundle
    order: AskForAgents
    actor: Any
    began: Any  # the future of its beginning
    num_attempts: int


class _Gang:
    """The agents, and the bundles that they are in."""

    def __init__(self, answer: Callable[[FromRay], None]):
        self._answer = answer
        self._agents: dict[Any, _RayAgent] = {}  # by the future of their end
        self._free: list[_Bundle] = []  # whose agent has ended
        self._looked_at = time.monotonic()
        self._is_short = self._has_gang = False

    def serve(self, orders: "queue.Queue[ToRay | None]") -> None:
        try:
            while True:
                with suppress(queue.Empty):
                    if (order := orders.get(timeout=TURN_S)) is None:
                        return
                    assert isinstance(order, AskForAgents)
                    self._start(order)
                self._collect()
                self._tell_of_room()
        finally:
            self._end()

    def _start(self, order: AskForAgents) -> None:
        """Into bundles whose agent ended, which Ray moves if their node died, or into new ones:
        of one group at the beginning, since no agent is of use without the others."""
        from ray.util.placement_group import placement_group

        bundles, self._free = self._free[: order.count], self._free[order.count :]
        missing = order.count - len(bundles)
        sizes = [1] * missing if self._has_gang else [missing]
        self._has_gang = True
        for size in sizes if missing else []:
            group = placement_group([{"CPU": order.cpus}] * size, strategy=order.strategy)
            bundles += [_Bundle(group, number, order.cpus) for number in range(size)]
        for bundle in bundles:
            self._run_agent(bundle, order)

    def _run_agent(self, bundle: _Bundle, order: AskForAgents, num_attempts: int = 1) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = ray.remote(num_cpus=bundle.cpus, max_restarts=0)(HostActor)
        place = PlacementGroupSchedulingStrategy(bundle.group, bundle.number)
        actor = kind.options(scheduling_strategy=place).remote()
        began = actor.begin.remote()
        ended = actor.run_agent.remote(order.invitation, order.python, order.variables)
        self._agents[ended] = _RayAgent(bundle, order, actor, began, num_attempts)

    def _collect(self) -> None:
        import ray

        if not self._agents:
            return
        for ended in ray.wait(list(self._agents), timeout=0)[0]:
            agent = self._agents.pop(ended)
            try:
                code, printed = ray.get(ended)
                how = f"the agent {describe_exit(code)}" + (f": {printed}" if printed else "")
            except ray.exceptions.RayError as error:
                how = _why_lost(str(error))
                if not self._has_begun(agent) and agent.num_attempts < ATTEMPTS:
                    # Ray gave it to a node that was dead already, and has found out now.
                    self._run_agent(agent.bundle, agent.order, agent.num_attempts + 1)
                    continue
            ray.kill(agent.actor)
            self._answer(AgentEnded(how))
            self._reuse(agent.bundle)

    def _has_begun(self, agent: _RayAgent) -> bool:
        """Whether its actor ran at some time."""
        import ray

        if not ray.wait([agent.began], timeout=0)[0]:
            return False
        try:
            ray.get(agent.began)
        except ray.exceptions.RayError:
            return False
        return True

    def _reuse(self, bundle: _Bundle) -> None:
        """Another agent may have been asked for before Ray found this one's node dead. The two
        would wait for the same CPUs, so it moves here."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for ended, agent in self._agents.items():
            if agent.bundle.group.bundle_count == 1 and not _has_room(agent.bundle.group):
                del self._agents[ended]
                ray.kill(agent.actor)
                remove_placement_group(agent.bundle.group)
                self._run_agent(bundle, agent.order)
                return
        self._free.append(bundle)

    def _tell_of_room(self) -> None:
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        waiting = [
            agent.bundle.cpus
            for agent in self._agents.values()
            if not self._has_begun(agent) and not _has_room(agent.bundle.group)
        ]
        if waiting or self._is_short:
            self._answer(NoRoom(waiting, _nodes()))
        self._is_short = bool(waiting)

    def _end(self) -> None:
        """End the agents, and give the bundles back."""
        import ray
        from ray.util.placement_group import remove_placement_group

        bundles = [*self._free, *(agent.bundle for agent in self._agents.values())]
        for agent in self._agents.values():
            ray.kill(agent.actor)
        for group in {bundle.group.id: bundle.group for bundle in bundles}.values():
            remove_placement_group(group)
        ray.shutdown()


def _why_lost(text: str) -> str:
    """Why an actor is gone, without Ray's numbers of it. Pure."""
    if "node has died" in text or "node was terminated" in text:
        return "the node of an agent died"
    if "temporarily unavailable" in text:
        return "the node of an agent cannot be reached"
    return f"the actor of an agent was lost: {' '.join(text.split())[:TAIL_CHARACTERS]}"


def _words(error: BaseException) -> str:
    """An error of Ray in a line: it adds links and tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:TAIL_CHARACTERS] or type(error).__name__


if __name__ == "__main__":
    # By its name, so that workers of Ray find the actor's class where it is, not here.
    from shoal.cluster import ray_process

    ray_process.main()
