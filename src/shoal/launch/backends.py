"""Where the processes of a run start, by the name that `on=` and `--on` take.

A back end (`cluster/backend.py`) is one line in BACKENDS: its name, and the function that makes it.
What only starts agents on other machines (`cluster/agent_starter.py`) is one line in STARTERS; the
back end of several hosts does the rest. What follows the name after a colon is its own, as in
`hosts:a,b,c`.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from shoal.cluster.agent_starter import AgentStarter, JoinByHand
from shoal.cluster.backend import Backend
from shoal.cluster.hosts import HostsBackend
from shoal.cluster.local import LocalBackend
from shoal.cluster.on_kubernetes import KubernetesStarter
from shoal.cluster.on_slurm import SlurmStarter
from shoal.cluster.ssh import SshStarter, read_hosts
from shoal.comm.endpoint import GLOO_INTERFACE, interface_of, named_interface
from shoal.errors import UsageError, nearest
from shoal.formatting import plural
from shoal.plans.plan import Plan
from shoal.training.options import Recipe

if TYPE_CHECKING:
    from shoal.launch.train import Options

JOIN_TIMEOUT_S = 600.0
TRUST = "SHOAL_TRUST_NETWORK"  # set to 1, it stands for --trust-network
Factory = Callable[[str, Recipe, "Options"], Backend]
StarterFactory = Callable[[str, "Options"], AgentStarter]


def make_backend(recipe: Recipe, options: "Options") -> Backend:
    """The back end that a run is asked to use."""
    name, address = check_on(options.on)
    if name in BACKENDS:
        return BACKENDS[name](address, recipe, options)
    return on_hosts(STARTERS[name](address, options), recipe, options)


def check_on(on: str) -> tuple[str, str]:
    """The name of a back end that there is, and what follows it."""
    name, _, address = on.partition(":")
    known = [*BACKENDS, *STARTERS]
    if name not in known:
        raise UsageError(f"--on {on}: there is no such back end. {nearest(name, known)}")
    return name, address


def on_hosts(starter: AgentStarter, recipe: Recipe, options: "Options") -> HostsBackend:
    """The back end of several hosts, whose agents this starts."""
    if not recipe.is_named:
        raise UsageError(
            "Other hosts load the recipe by its name, and this one has none that they could find. "
            "Give it as file.py:function or module:function."
        )
    if starter.num_hosts < 2 and starter.is_host:
        raise UsageError("A run on several hosts needs two at least. Leave --on out for one.")
    return HostsBackend(
        starter=starter,
        address=options.listen,
        timeout_s=options.join_timeout_s or JOIN_TIMEOUT_S,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        recipe=recipe.name,
        settings=dict(recipe.settings),
        options=options.start_options(),
        include=options.include,
        slots=options.slots or getattr(starter, "slots", None),
        trust_network=_trusts_network(options),
    )


def refuse_without_hosts(options: "Options") -> None:
    """Refuse options of a run on several hosts that is on one, and addresses and interfaces that
    this machine does not have."""
    interface = named_interface()
    if options.listen is not None and interface not in ("", own := interface_of(options.listen)):
        raise UsageError(
            f"--listen {options.listen} is at {own}, and {GLOO_INTERFACE} names {interface}. Unset "
            f"that, or give --listen an address of {interface}."
        )
    if options.spans_hosts:
        if options.on == "local":
            _num_joining(options)
        return
    given = {
        "--join-timeout": options.join_timeout_s,
        "--nodes": options.nodes,
        "--slots": options.slots,
        "--include": options.include or None,
        "--python": options.python,
        "--trust-network": options.trust_network or None,
    }
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name} has no effect without --listen ADDRESS or --on WHERE: the run is on this "
                "machine alone."
            )


def _local(address: str, recipe: Recipe, options: "Options") -> Backend:
    """This machine, and with `--listen` the hosts that join it."""
    if address:
        raise UsageError(f"--on local:{address}: local is this machine, and takes no address.")
    if options.listen is None:
        return LocalBackend()
    return on_hosts(JoinByHand(_num_joining(options)), recipe, options)


def _num_joining(options: "Options") -> int:
    """How many hosts a run has that is joined by hand: `--nodes`, or hosts=H in its plan."""
    in_plan = 1 if options.plan is None else Plan.parse(options.plan).hosts
    found = options.nodes or in_plan
    if found == 1:
        raise UsageError(
            "--listen has no effect for one host. Say with --nodes N how many there are, or leave "
            "--listen out."
        )
    return found


def _hosts(address: str, options: "Options") -> AgentStarter:
    names = read_hosts(address)
    if options.nodes not in (None, len(names)):
        raise UsageError(
            f"--on hosts:{address} names {len(names)} hosts, and --nodes says {options.nodes}. "
            "Leave --nodes out."
        )
    return SshStarter(names, options.python)


def _slurm(address: str, recipe: Recipe, options: "Options") -> Backend:
    """The nodes of the allocation that this is in. The address, options of sbatch, has its effect
    where jobs are submitted."""
    return _on_engine("slurm", SlurmStarter(), recipe, options)


def _kubernetes(address: str, recipe: Recipe, options: "Options") -> Backend:
    """The pods of the job that this is in; as for Slurm."""
    return _on_engine("kubernetes", KubernetesStarter(options.nodes or 1), recipe, options)


def _on_engine(name: str, starter: AgentStarter, recipe: Recipe, options: "Options") -> Backend:
    if options.nodes not in (None, starter.num_hosts):
        raise UsageError(
            f"--on {name} --nodes {options.nodes}: the job has {plural(starter.num_hosts, 'node')}."
            " Leave --nodes out."
        )
    if starter.num_hosts == 1 and starter.is_host:
        return LocalBackend()
    return on_hosts(starter, recipe, options)


def _ray(address: str, options: "Options") -> AgentStarter:
    """`ray`, `ray:spread,hosts=2`, `ray:10.0.0.1:6379`, `ray://10.0.0.1:10001`."""
    from shoal.cluster.on_ray import RayStarter, parse_place

    place = parse_place(address)
    plan = Plan.parse(options.plan or "")
    in_plan = None if plan.hosts == 1 else plan.hosts
    place = msgspec.structs.replace(
        place,
        num_hosts=place.num_hosts or options.nodes or in_plan,
        cpus=place.cpus or options.slots,
    )
    num_ranks = None if plan.data is None else plan.num_ranks
    timeout_s = options.join_timeout_s or JOIN_TIMEOUT_S
    return RayStarter(
        place,
        num_ranks,
        plan.data or 1,
        timeout_s,
        python=options.python or "",
        trusts_network=_trusts_network(options),
    )


def _trusts_network(options: "Options") -> bool:
    return options.trust_network or os.environ.get(TRUST, "") not in ("", "0")


BACKENDS: dict[str, Factory] = {"local": _local, "slurm": _slurm, "kubernetes": _kubernetes}
STARTERS: dict[str, StarterFactory] = {"hosts": _hosts, "ray": _ray}
