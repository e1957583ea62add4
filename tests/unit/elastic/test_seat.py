"""A seat lets go of a broken group at once, whoever else still holds a connection of it."""

import os
import socket
import threading
from pathlib import Path

import pytest
import zmq

from shoal.comm.endpoint import Endpoint
from shoal.comm.wire import listen
from shoal.elastic import messages
from shoal.elastic.seat import SupervisedSeat
from shoal.errors import GroupLost, StopNow


def test_the_connections_of_a_lost_group_are_shut_before_the_next_is_formed(
    tmp_path: Path,
) -> None:
    """Otherwise an operation left behind between two survivors holds up the old group's end."""
    context = zmq.Context()
    reach = Endpoint(str(tmp_path))
    supervisor, address = listen(context, *reach.place, 1000)
    seat = SupervisedSeat(address, "member-0", reach=reach, recovers=False)
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    seat._group_sockets = {os.readlink(f"/proc/self/fd/{near.fileno()}")}
    far.settimeout(30.0)
    seen: list[bytes] = []

    def answer() -> None:
        identity, _ = supervisor.recv_multipart()
        seen.append(far.recv(1))  # the end of the stream, before anybody told the seat to leave
        supervisor.send_multipart([identity, messages.encode(messages.Release())])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(StopNow):
            seat.reform(GroupLost("a peer is gone"))
        thread.join()
        assert seen == [b""]
    finally:
        seat.close()
        for opened in (near, far, listener):
            opened.close()
        supervisor.close(linger=0)
        context.term()


def test_a_member_waits_longer_for_the_others_than_the_supervisor_does(tmp_path: Path) -> None:
    nobody, reach = f"ipc://{tmp_path}/nobody", Endpoint(str(tmp_path))
    seat = SupervisedSeat(nobody, "member-0", reach=reach, form_timeout_s=600.0)
    try:
        assert seat._patience_s > 600.0
    finally:
        seat.close()
