"""How to free a thread that waits in a collective for a peer that will never answer.

Gloo's own abort does not interrupt a wait. Shutting down the group's connections does: every
pending read and write fails at once. The group's are those that appeared while it formed. Only
sockets with a peer are touched, since shutting down a listening one ends the process in Gloo's
accept loop.
"""

import os
import socket


def open_sockets() -> dict[str, int]:
    """This process's sockets: name (unique while it is open) and file descriptor."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed since it was listed
        if name.startswith("socket:"):
            found[name] = int(entry)
    return found


def shut_down(names: set[str]) -> int:
    """Shut down those of the named sockets that have a peer; how many there were."""
    num_shut = 0
    for name, descriptor in open_sockets().items():
        if name not in names:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                # The descriptor may have been closed and given to another socket meanwhile.
                same = os.readlink(f"/proc/self/fd/{duplicate.fileno()}") == name
                if same and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    duplicate.getpeername()
                    duplicate.shutdown(socket.SHUT_RDWR)
                    num_shut += 1
        except OSError:
            continue  # no peer, or gone
    return num_shut
