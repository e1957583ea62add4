"""A model of thousands of small parameters fits in the messages of servers."""

import torch

from shoal.comm.wire import MOST_FRAMES, pack, unpack
from shoal.sync.server.loop import _DECODER, SLACK_BYTES
from shoal.sync.server.messages import DumpedState, DumpState, LoadState
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard, layout_of, settings_of
from tests.unit.sync.server.played import SECRET, Worker, make_model, push_all, send, tensor_bytes

NUM_PARAMETERS = 3_000


def server_of_many() -> Server:
    model = make_model(*[8] * NUM_PARAMETERS)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    shard = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0)
    server = Server(shard, num_seats=1, num_pieces=1, bound=0, secret=SECRET)
    server.begin(3)
    return server


def test_a_state_of_thousands_of_tensors_is_one_message() -> None:
    server = server_of_many()
    worker = Worker(0, server)
    worker.settings = settings_of(server.shard.optimizer)
    send(server, worker, worker.hello())
    push_all(server, worker, 0, 1.0)
    send(server, worker, worker.apply(0))
    (answer,) = send(server, worker, worker.make(DumpState))
    assert isinstance(answer.message, DumpedState)
    assert len(pack(answer.message, answer.payload)) < MOST_FRAMES / 100
    frames = [bytes(frame) for frame in pack(worker.make(LoadState, step=1), answer.payload)]
    message, payload = unpack(frames, _DECODER, server.most_bytes + SLACK_BYTES)
    other = server_of_many()
    send(other, worker, worker.hello())
    other.handle(worker.name, message, payload)
    assert tensor_bytes(other) == tensor_bytes(server)
