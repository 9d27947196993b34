"""The process that forks programs for the tests goes on after requests whose sender was killed, and ends with them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import python_programs

pytestmark = pytest.mark.skipif(not python_programs.IS_SUPPORTED, reason="programs are forked on Linux only")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("sent", [b"", b'{"environment"', b"whole"])
def test_a_killed_client_does_not_end_the_server(tmp_path: Path, sent: bytes) -> None:
    path = str(tmp_path / "forks")
    server = python_programs.serve(path, ("json",))
    try:
        while not os.path.exists(path):
            time.sleep(0.01)
        request = {"environment": {}, "folder": str(tmp_path), "module": "json.tool", "arguments": ["--help"]}
        with socket.socket(socket.AF_UNIX) as client, open(os.devnull) as null:
            while client.connect_ex(path):  # the socket exists before it listens
                time.sleep(0.01)
            if sent:
                content = json.dumps(request).encode() + b"\n" if sent == b"whole" else sent
                socket.send_fds(client, [content], [null.fileno()] * 3)
        command = python_programs.client(path, "json.tool", "--help")
        assert b"usage" in subprocess.run(command, check=True, capture_output=True, timeout=200).stdout
    finally:
        server.terminate()
        server.wait()


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    path = str(tmp_path / "forks")
    code = f"""import os
from tests import python_programs
server = python_programs.serve({path!r}, ("json",))
while not os.path.exists({path!r}):
    pass
print(server.pid, flush=True)
os._exit(0)"""  # no exit function runs, as in a killed process
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    with pytest.raises(ProcessLookupError):
        for _ in range(600):
            os.kill(int(ended.stdout), 0)
            time.sleep(0.1)
