"""What the supervisor's decisions depend on beside what happens. Read next: `membership.py`."""

from collections.abc import Mapping
from typing import NamedTuple

from shoal.plans.resize import SizeRules


class MembershipOptions(NamedTuple):
    """How many processes there are beside the seats, and how long is waited for each."""

    num_spares: int = 1  # of each host
    num_hosts: int = 1
    heartbeat_timeout_s: float = 10.0
    form_timeout_s: float = 30.0
    regroup_after_s: float = 2.0
    # Members run the user's program, which may train several times or never, and are done when
    # it exits.
    scripts: bool = False
    hosts: tuple[int, ...] = ()  # of each seat at the start; empty: `host_of`
    slots: Mapping[int, int] = {}  # ranks that each host has room for; empty: those at the start
    rules: SizeRules = SizeRules()  # of the plan
    host_timeout_s: float = 600.0  # for another host, if those that are left are too few
