"""Programs that start at once, because they are forked from one process that has imported what they need.

`serve(SOCKET, PACKAGES)` is that process. `start(SOCKET, MODULE, ARGUMENTS)` stands for `python -m MODULE ARGUMENTS`:
it asks for a fork, passes signals on to it and ends as it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

PARENT = "NUMBER_OF_THE_PARENT_PROCESS"
"""Stands for its value in the arguments of a fork, whose parent is not the client."""


def serve(path: str, packages: list[str]) -> None:
    """Import the packages, then fork a program for each request until this process is ended or its input ends.

    The environment of this process has no PYTHONPATH: each program has its own.
    """
    installed = sys.path[1:]  # the first is the folder of this file
    for name in packages:
        __import__(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, ())
    selector.register(sys.stdin, selectors.EVENT_READ, ())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    programs: dict[int, socket.socket] = {}
    try:
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:  # the process that started this one has ended
                    return
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    try:
                        program = _fork(connection, [listener, *programs.values()], installed)
                    except OSError:  # the process that asked for it was killed
                        connection.close()
                        continue
                    programs[program] = connection
                    selector.register(connection, selectors.EVENT_READ, ("end", program))
                    selector.register(os.pidfd_open(program), selectors.EVENT_READ, ("ended", program))
                elif key.data[0] == "end":  # the process that asked for it was killed
                    selector.unregister(key.fileobj)
                    _end(key.data[1])
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    connection = programs.pop(key.data[1])
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    _, status = os.waitpid(key.data[1], 0)
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    finally:
        for program in programs:
            _end(program)


def _end(program: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)


def _fork(connection: socket.socket, others: list[socket.socket], installed: list[str]) -> int:
    """Fork a program with the module, environment, folder and streams of a request; return its number.

    Raises OSError where the process that made the request has ended: then no program is left.
    """
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 20)
        if not more:
            for stream in streams:
                os.close(stream)
            raise ConnectionError("the request has no end")
        data += more
    request = json.loads(data)
    program = os.fork()
    if program == 0:
        _exit(lambda: _become(request, streams, [connection, *others], installed))
    for stream in streams:
        os.close(stream)
    try:
        connection.sendall(f"{program}\n".encode())
    except OSError:
        os.kill(program, signal.SIGKILL)  # it may not lead a group of processes yet
        os.waitpid(program, 0)
        raise
    return program


def _become(request: dict[str, Any], streams: list[int], sockets: list[socket.socket], installed: list[str]) -> None:
    import runpy

    os.setsid()
    for each in sockets:
        each.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    added = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [os.getcwd(), *added, *installed]
    sys.argv = ["-m", *(text.replace(PARENT, str(os.getppid())) for text in request["arguments"])]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _exit(run: Any) -> None:
    """Run a function and end this process as the end of Python's main program does, but not through its callers."""
    import atexit
    import threading

    code = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _end_with(code)


def _end_with(code: int) -> None:
    """End this process with an exit status or, where it is negative, with that signal."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def start(path: str, module: str, arguments: list[str]) -> int:
    """Ask for a program, pass signals on to it, and return its exit status, negative for a signal."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {"environment": dict(os.environ), "folder": os.getcwd(), "module": module, "arguments": arguments}
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    answer = connection.makefile()
    program = int(answer.readline())

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    return int(answer.read() or 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        _end_with(start(sys.argv[2], sys.argv[3], sys.argv[4:]))
