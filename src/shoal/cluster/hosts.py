"""The back end of several hosts, over anything that starts agents on them (`agent_starter.py`).

The first host, number 0, is that of the command. It prepares the run, listens, has agents started,
and sends each the run and its files (`host_links.py`). When all have prepared the same, each rank
and server gets its host (`placement.py`). For the supervisor all of it is one `Processes`. A host
that is lost is reported, and the starter is asked for another, which is reported when it has
prepared.

Read next: `host_agent.py`, for the other hosts' side.
"""

import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.cluster.agent_starter import AgentStarter
from shoal.cluster.backend import Facts, StartedRun
from shoal.cluster.bundle import find_modules, make_bundle
from shoal.cluster.checkpoint_proof import CheckpointProof
from shoal.cluster.host_channel import PROOF, PrepareHost, RunEnded, SeatsTaken
from shoal.cluster.host_links import HostLinks, JoinRules, Preparation, RemoteHost, comparable_facts
from shoal.cluster.invitation import Invitation, remove_invitation, write_invitation
from shoal.cluster.local import prepared_fork_server
from shoal.cluster.placement import Placement, clear_text, describe_seats, place
from shoal.comm.endpoint import (
    Endpoint,
    address_towards,
    hold_keys,
    host_environment,
    interface_of,
    is_loopback,
    resolve_name,
)
from shoal.comm.unix import socket_directory
from shoal.comm.wire import new_keys
from shoal.errors import FormError, UsageError
from shoal.events.events import (
    HostJoinedEvent,
    HostLeftEvent,
    HostsMissingEvent,
    ModelNotSavableEvent,
    OnEvent,
    WarningEvent,
)
from shoal.formatting import plural
from shoal.logs import log
from shoal.plans.plan import Plan
from shoal.plans.resize import size_of
from shoal.storage.files import write_private
from shoal.system.fork_server import (
    ForkServer,
    Prepare,
    Report,
    SignalWorker,
    SpawnWorker,
    WorkerMain,
    WorkerSpec,
)
from shoal.training.options import KEEPS_NOTHING, StartOptions
from shoal.world import CORES, cores

REMIND_S = 30.0  # between two messages about missing hosts
TURN_S = 0.1  # between two turns at the most, in which packets are sent
ASK_S = 1.0  # between two questions to the starter
_COUNT = struct.Struct("<q")
_NOWHERE = "192.0.2.1"  # reserved for examples: only asked by which address packets would leave


class HostsBackend(NamedTuple):
    """Starts the processes of a run on several hosts."""

    starter: AgentStarter
    address: str | None  # of this host; None: the one that leads to the others
    timeout_s: float  # for hosts to join
    heartbeat_timeout_s: float
    recipe: str
    settings: dict[str, str]
    options: StartOptions  # for the preparation
    include: tuple[str, ...] = ()  # files that travel beside the recipe's own
    slots: int | None = None  # of each host; None: its cores
    trust_network: bool = False

    @contextmanager
    def start(self, prepare: Prepare, run_dir: Path, watch: OnEvent) -> Iterator[StartedRun]:
        """Prepare here and on all other hosts, which have to come first."""
        address = self.address or _address_of(self.starter)
        interface_of(address)
        if self.options.plan is not None:  # else the recipe has one, which is not known yet
            self._refuse_plan(Plan.parse(self.options.plan), address)
        make_bundle((), self.include)  # what cannot travel is refused before anything starts
        prearranged = getattr(self.starter, "invitation", None)  # one that agents have already
        port = prearranged and prearranged.endpoint[1]
        keys = (prearranged and prearranged.keys) or new_keys()
        hold_keys(keys)  # before processes are forked
        with ExitStack() as held:
            sockets = str(held.enter_context(socket_directory(run_dir)))
            reach = Endpoint(sockets, address, keys)
            links = HostLinks(reach, self._rules(), run_dir / "logs")
            held.callback(self._end, links, run_dir)
            count = _CoreCount(self._counts_cores)
            held.callback(count.close)
            gathering = _Gathering(links, self.starter, run_dir, watch, self.timeout_s)

            def invite() -> None:
                links.open(port)
                invitation = Invitation(links.address, keys, str(run_dir.absolute()))
                if is_by_hand(self.starter):
                    write_invitation(invitation, run_dir)
                self.starter.start(invitation.encode(), gathering.num_others)
                gathering.invitation = invitation.encode()
                if self._counts_cores:
                    gathering.wait(lambda host: True)
                count.send(sum(self._slots(links).values()))

            own, facts = held.enter_context(
                prepared_fork_server(
                    count.before(self._listing(prepare)),
                    run_dir / "logs" / "recipe.log",
                    meanwhile=invite,
                    turn=gathering.turn,
                )
            )
            proof = held.enter_context(CheckpointProof(self.options.checkpoints))
            plan = Plan.parse(facts["plan"])
            self._refuse_plan(plan, address)
            links.prepare(self._preparation(facts, run_dir, proof))
            gathering.wait(lambda host: host.is_prepared)
            placement = self._place(plan, links)
            hosts = Hosts(own, links, gathering, host_environment(address, sockets))
            hosts.begin(plan, placement, watch)

            def end(exit_code: int, cause: str) -> None:
                links.run_ended = RunEnded(exit_code, cause)

            yield StartedRun(
                hosts, facts, reach, self.starter.num_hosts, end, placement, self._slots(links)
            )

    def _end(self, links: HostLinks, run_dir: Path) -> None:
        links.dismiss()
        self.starter.close()
        remove_invitation(run_dir)
        with suppress(OSError):
            (run_dir / PROOF).unlink(missing_ok=True)

    @property
    def _counts_cores(self) -> bool:
        """Whether the plan may depend on the cores of all hosts, which must be here first then."""
        return self.options.plan is None or Plan.parse(self.options.plan).data is None

    def _rules(self) -> JoinRules:
        starter = self.starter
        num_others = starter.num_hosts - starter.is_host
        return JoinRules(
            starter.num_hosts, num_others, self.heartbeat_timeout_s, self.timeout_s, self.slots
        )

    def _slots(self, links: HostLinks) -> dict[int, int]:
        own = {0: self.slots or cores()} if self.starter.is_host else {}
        return own | links.cores

    def _listing(self, prepare: Prepare) -> Prepare:
        """In the fork server: prepare, and find the files that the recipe was loaded from."""

        def listed() -> tuple[Facts, WorkerMain]:
            facts, main = prepare()
            return {**facts, "sources": find_modules(Path.cwd(), _file_of(self.recipe))}, main

        return listed

    def _refuse_plan(self, plan: Plan, address: str) -> None:
        if not (self.trust_network or is_loopback(address)):
            refuse_clear_text(plan)
        if plan.hosts not in (1, self.starter.num_hosts):
            raise UsageError(
                f"The plan adds up gradients on hosts={plan.hosts}, and the run has "
                f"{self.starter.num_hosts}. Give as many with --nodes, or leave hosts out."
            )

    def _preparation(self, facts: Facts, run_dir: Path, proof: CheckpointProof) -> Preparation:
        bundle = make_bundle(facts.pop("sources"), self.include)
        saves = facts.get("run", {}).get("save_every", {}).get("value") is not None
        options, directory = self.options, Path.cwd()
        place = options.checkpoints
        if place is not None and "://" not in place:
            place = str(Path(place).absolute())
        message = PrepareHost(
            recipe=self.recipe,
            spec=_spec_below(self.recipe, directory),
            settings=self.settings,
            options=msgspec.structs.replace(options, plan=facts["plan"], checkpoints=place),
            directory=str(directory),
            run_dir=str(run_dir.absolute()),
            proof=proof.token,
            needs_run_dir=not self.starter.is_host,
            needs_checkpoints=saves or options.resume or place is not None,
            files=bundle.files,
        )
        write_private(run_dir / PROOF, proof.token.encode(), replace=True)
        return Preparation(message, bundle, comparable_facts(facts), proof.show)

    def _place(self, plan: Plan, links: HostLinks) -> Placement:
        slots = self._slots(links)
        placement = place(plan, slots)
        if idle := sorted({*slots} - {*placement}):
            raise UsageError(
                f"The plan {str(plan)!r} has {plural(plan.num_ranks, 'rank')} and the run "
                f"{plural(len(slots), 'host')}: nothing would run on host {idle[0]}. Use more "
                "ranks, or fewer hosts."
            )
        return placement


def refuse_clear_text(plan: Plan) -> None:
    """Refuse to send a model over a network that others may listen to."""
    if what := clear_text(plan):
        raise UsageError(
            f"Under {str(plan)!r} {what} would cross the network in clear text: Gloo, which moves "
            "them between hosts, does not encrypt. If nobody else listens on that network, say so "
            "with --trust-network; else use sync=server with replicas of one rank each, whose "
            "messages are encrypted, or keep the ranks on one host."
        )


def is_by_hand(starter: AgentStarter) -> bool:
    """Whether a person starts the agents, with `shoal join`."""
    return bool(getattr(starter, "is_by_hand", False))


def _address_of(starter: AgentStarter) -> str:
    """The address of this host that leads to the others: to the starter's `peer`, if it has one."""
    peer = getattr(starter, "peer", "")
    return address_towards(resolve_name(peer) if peer else _NOWHERE, 9)


def _file_of(recipe: str) -> Path | None:
    where = recipe.rpartition(":")[0]
    return Path(where) if where.endswith(".py") else None


def _spec_below(recipe: str, directory: Path) -> str:
    """The recipe, by a path relative to the directory, which hosts may have elsewhere."""
    file = _file_of(recipe)
    if file is None:
        return recipe
    return f"{os.path.relpath(file.resolve(), directory)}:{recipe.rpartition(':')[2]}"


class _CoreCount:
    """Gives the fork server the number of cores of all hosts, once it is known."""

    def __init__(self, waits: bool):
        self._ends = os.pipe()
        self._waits = waits

    def before(self, prepare: Prepare) -> Prepare:
        """In the fork server: prepare once the count has come."""

        def prepare_then() -> tuple[Facts, WorkerMain]:
            content = os.read(self._ends[0], _COUNT.size) if self._waits else b""
            self.close()
            if content:
                os.environ[CORES] = str(_COUNT.unpack(content)[0])
            return prepare()

        return prepare_then

    def send(self, count: int) -> None:
        os.write(self._ends[1], _COUNT.pack(count))

    def close(self) -> None:
        ends, self._ends = self._ends, (-1, -1)
        for end in ends:
            if end >= 0:
                os.close(end)


class _Gathering:
    """Waits for hosts, with events of those that come and go, and asks the starter for others."""

    def __init__(
        self,
        links: HostLinks,
        starter: AgentStarter,
        run_dir: Path,
        watch: OnEvent,
        timeout_s: float,
    ):
        self.invitation = b""
        self.num_others = starter.num_hosts - starter.is_host
        self._links, self._starter, self._run_dir, self._watch = links, starter, run_dir, watch
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._known: set[str] = set()
        self._told_at = self._asked_at = 0.0

    def wait(self, is_there: Callable[[RemoteHost], bool]) -> None:
        """Until as many hosts are there as the run is to have."""
        while True:
            self.turn(TURN_S)
            if len([host for host in self._links.live if is_there(host)]) == self.num_others:
                return

    def turn(self, timeout_s: float = 0.0) -> None:
        """Hear of hosts, and raise what keeps the run from having all. While all are here, they
        prepare, which may take as long as it likes."""
        self._tell({host.name for host in self._links.live})
        now, missing = time.monotonic(), self.num_others - len(self._links.live)
        self._refuse_hopeless(now)
        if not missing:
            self._deadline = now + self._timeout_s
        if now > self._deadline:
            raise FormError(self._too_late(missing))
        self._links.turn(timeout_s)
        self._links.forget_lost()  # before the run begins another host may take its place

    def _tell(self, names: set[str]) -> None:
        now = time.monotonic()
        for name in sorted(names ^ self._known):
            self._watch(HostJoinedEvent(name=name) if name in names else HostLeftEvent(name=name))
        missing = self.num_others - len(names)
        if missing and (names != self._known or now - self._told_at > REMIND_S):
            self._told_at = now
            where = str(self._run_dir) if is_by_hand(self._starter) else ""
            self._watch(HostsMissingEvent(count=missing, run_dir=where))
        self._known = names

    def _refuse_hopeless(self, now: float) -> None:
        """Agents that were started and have ended will not come; people may try again."""
        refused = self._links.take_refused()
        if is_by_hand(self._starter):
            for why in refused:
                self._watch(WarningEvent(text=why))
            return
        if refused:
            raise UsageError(refused[0])
        if now - self._asked_at > TURN_S:
            self._asked_at = now
            if ended := self._starter.poll():
                raise UsageError(ended[0])

    def _too_late(self, missing: int) -> str:
        began = f"{plural(missing, 'host')} of {self._starter.num_hosts} did not come within "
        if is_by_hand(self._starter):
            return (
                f"{began}{self._timeout_s:g} s. Run `shoal join {self._run_dir}` on each of them "
                "meanwhile; --join-timeout gives them longer."
            )
        return (
            f"{began}{self._timeout_s:g} s: their agents were started, and cannot reach this host "
            f"at {self._links.address}, or are slow. --listen ADDRESS names another address, "
            "--join-timeout gives them longer."
        )

    def replace(self, count: int) -> None:
        """Ask for other hosts in the place of lost ones."""
        self._starter.start(self.invitation, count)

    def ask(self) -> None:
        """Say what became of agents that were started in the place of lost ones."""
        now = time.monotonic()
        if now - self._asked_at > ASK_S:
            self._asked_at = now
            for told in (*self._links.take_refused(), *self._starter.poll()):
                log.warning("%s", told)


class Hosts:
    """`Processes` on all hosts."""

    def __init__(
        self,
        own: ForkServer,
        links: HostLinks,
        gathering: _Gathering,
        variables: dict[str, str],
    ):
        self._own, self._links, self._gathering = own, links, gathering
        self._variables = variables  # of processes of this host
        self._shared: dict[str, str] = {}  # of processes of all hosts
        self._host_numbers: dict[int, int] = {}  # member -> its host

    def begin(self, plan: Plan, placement: Placement, watch: OnEvent) -> None:
        """Tell the hosts that the run begins, and who sits there."""
        self._links.begin()
        for host in self._links.live:
            seats = describe_seats(host.number, size_of(plan), placement)
            self._links.send(host, SeatsTaken(seats))
        if blind := [host.name for host in self._links.live if not host.sees_checkpoints]:
            self._shared = {KEEPS_NOTHING: "1"}
            why = (
                f"{blind[0]} does not see the run directory, and --checkpoints "
                "URL-or-shared-directory names no place that all hosts see"
            )
            watch(ModelNotSavableEvent(why=why))

    @property
    def poll_sources(self) -> list[Any]:
        return [*self._own.poll_sources, *self._links.poll_sources]

    @property
    def pids(self) -> dict[int, int]:
        """The pids of members, each as its host knows it."""
        found = dict(self._own.pids)
        for host in self._links.hosts.values():
            found |= host.pids
        return found

    def spawn(self, spec: WorkerSpec) -> None:
        self._host_numbers[spec.number] = spec.host
        spec = msgspec.structs.replace(spec, variables=spec.variables | self._shared)
        if spec.host == 0:
            own = msgspec.structs.replace(spec, variables=spec.variables | self._variables)
            self._own.spawn(own)
        elif (host := self._host(spec.host)) is not None:
            self._links.send(host, SpawnWorker(spec))

    def kill(self, number: int, signal_number: int = 9) -> None:
        host_number = self._host_numbers.get(number, 0)
        if host_number == 0:
            self._own.kill(number, signal_number)
        elif (host := self._host(host_number)) is not None:
            self._links.send(host, SignalWorker(number, signal_number))

    def next_report(self, timeout_s: float | None = None) -> Report | None:
        """The next report of any host. EOFError when the fork server of this one is gone."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        links = self._links
        while True:
            self._replace_lost()
            left_s = max(0.0, deadline - time.monotonic())
            links.turn(0.0 if links.reports else min(TURN_S, left_s), self._own.poll_sources)
            links.report_lost()
            while (report := self._own.next_report(0)) is not None:
                links.reports.append(report)
            if links.reports:
                return links.reports.popleft()
            if not left_s:
                return None

    def _replace_lost(self) -> None:
        """The supervisor goes on without the hosts whose loss it knows: ask for others."""
        if self._links.is_closing:
            return
        if not self._links.reports and (num_lost := self._links.forget_lost()):
            self._gathering.replace(num_lost)
        self._gathering.ask()

    def _host(self, number: int) -> RemoteHost | None:
        return next((h for h in self._links.hosts.values() if h.number == number), None)

    def describe_loss(self) -> str:
        lost = [f"{host.name} {host.lost}" for host in self._links.hosts.values() if host.lost]
        if not lost:
            return self._own.describe_loss()
        return f"{'; '.join(lost)}. No other host can fill its seats. Go on with --resume"

    def close(self) -> None:
        """End the members of all hosts."""
        self._own.close()
        self._links.end_members()
