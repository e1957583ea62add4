"""A gate in front of a server, which breaks connections when a test says so.

The connection is reset as a network does it, so clients see what they see when a link fails. It
keeps the first line of each connection, by which a test can tell what was asked.
"""

import socket
import struct
import threading
from contextlib import suppress


class Gate:
    """Passes connections on to a server. It resets the next `num_resets` of them instead."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self.num_resets = 0
        self.num_bytes = -1  # that a connection to reset may pass on before it is; -1: none
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.num_resets and self.num_bytes < 0:
                    self.num_resets -= 1
                    _reset(client)
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
            back.start()
            first = True
            with suppress(OSError):
                while content := client.recv(1 << 16):
                    if first:
                        self.requests.append(content.split(b" HTTP", 1)[0])
                        first = False
                    if self.num_resets and len(content) > self.num_bytes >= 0:
                        self.num_resets -= 1
                        _reset(client)
                        break
                    server.sendall(content)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            target.sendall(content)
        target.shutdown(socket.SHUT_RDWR)
