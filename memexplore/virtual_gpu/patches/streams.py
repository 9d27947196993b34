"""Make the streams and events of `torch.cuda`, and `torch.Stream` and `torch.Event` for any device.

The device runs all work in order, so that none is ever pending; memory is requested from the pool of the current stream
(`dispatch.streams`). The time between two events is the sum of the roofline times of the ops between them
(`dispatch.work.seconds_on`), at least that of a launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.torch_internals.cuda import CUDA_DEVICE_TYPE
from memexplore.virtual_gpu.dispatch import runner, streams
from memexplore.virtual_gpu.dispatch.work import LAUNCH
from memexplore.virtual_gpu.patches.device_names import index_of
from memexplore.virtual_gpu.tensors.tensor import DeviceState


class _OfTheGpu:
    """An object that names the virtual GPU as its device."""

    @property
    def device(self) -> torch.device:
        """The virtual GPU."""
        return DeviceState.cuda


class VirtualStream(_OfTheGpu):
    """A CUDA stream of a device that runs all work in order."""

    device_type = CUDA_DEVICE_TYPE

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        index_of(device)
        self.priority = priority
        self.stream_id = kwargs["stream_id"] if "stream_id" in kwargs else streams.new(priority)
        self.cuda_stream = self.native_handle = kwargs.get("stream_ptr", self.stream_id)
        self._chosen: list[int | None] = []
        """What was current before each `with` block of this stream that has not ended."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority of a stream."""
        return 0, -5

    @property
    def device_index(self) -> int:
        """Index of the virtual GPU."""
        return DeviceState.cuda.index

    def synchronize(self) -> None:
        """Return at once: no work is pending."""
        finished(self.cuda_stream)

    def wait_stream(self, stream: Any) -> None:
        """Return at once: no work is pending."""
        _ordered(self.cuda_stream, stream.cuda_stream)

    def wait_event(self, event: Any) -> None:
        """Return at once: no work is pending."""
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """Record an event, by default a new one, and return it."""
        event = event or VirtualEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the stream."""
        return False

    def __enter__(self) -> VirtualStream:
        self._chosen.append(streams.make_current(self.cuda_stream))
        return self

    def __exit__(self, *error: object) -> None:
        streams.make_current(self._chosen.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={DeviceState.cuda} cuda_stream={self.cuda_stream:#x}>"


class VirtualEvent(_OfTheGpu):
    """A CUDA event; its time is the roofline time of the ops that ran before it."""

    cuda_event = event_id = 0

    def __init__(self, device: Any = None, *flags: bool, enable_timing: bool = False, **kwargs: Any) -> None:
        # torch.cuda.Event takes `enable_timing`, `blocking` and `interprocess` in this order, torch.Event the device.
        self.enable_timing = device if isinstance(device, bool) else enable_timing
        self._seconds: float | None = None
        self._stream, self._position = streams.DEFAULT, 0

    def record(self, stream: Any = None) -> None:
        """Record the time of all work so far."""
        running = runner.active()
        self._seconds = running.time() if running is not None and self.enable_timing else 0.0
        self._stream = streams.current() if stream is None else stream.cuda_stream
        observer = _observer()
        self._position = 0 if observer is None else observer.position() or 0

    def wait(self, stream: Any = None) -> None:
        """Return at once: no work is pending."""
        if self._seconds is not None:
            waiting = streams.current() if stream is None else stream.cuda_stream
            _ordered(waiting, self._stream, self._position)

    def synchronize(self) -> None:
        """Return at once: no work is pending."""
        if self._seconds is not None:
            finished(self._stream, self._position)

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        """Return the milliseconds from this event to another, never 0.

        Raises ValueError for events that were not recorded or that have no timing, as torch does.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds or LAUNCH) * 1000

    def ipc_handle(self) -> bytes:
        """Return a handle of 64 bytes."""
        return bytes(64)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> VirtualEvent:
        """Return an event of another process, as a new one."""
        return cls()


def _observer() -> runner.Observer | None:
    running = runner.active()
    return None if running is None else running.observer


def _ordered(stream: int, other: int, until: int | None = None) -> None:
    observer = _observer()
    if observer is not None:
        observer.ordered(stream, other, until)


def finished(stream: int | None, until: int | None = None) -> None:
    """Tell the recording that the program waits for a stream, None for all; `until` as in `observer.Observer`."""
    observer = _observer()
    if observer is not None:
        observer.finished(stream, until)


def functions() -> dict[str, Any]:
    """Return the names of `torch.cuda` about streams and events, and their replacements."""
    default = VirtualStream(stream_id=streams.DEFAULT)

    def current_stream(device: Any = None) -> VirtualStream:
        index_of(device)
        number = streams.current()
        return default if number == streams.DEFAULT else VirtualStream(stream_id=number)

    def set_stream(stream: VirtualStream | None) -> None:
        if stream is not None:
            streams.make_current(stream.cuda_stream)

    @contextlib.contextmanager
    def on_stream(stream: Any = None) -> Iterator[None]:
        if stream is None:
            yield
            return
        with stream:
            yield

    def external(pointer: int, device: Any = None, **kwargs: Any) -> VirtualStream:
        return VirtualStream(device, stream_ptr=pointer)

    return {
        "Stream": VirtualStream,
        "ExternalStream": external,
        "get_stream_from_external": external,
        "Event": VirtualEvent,
        "stream": on_stream,
        "StreamContext": on_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: default,
        "set_stream": set_stream,
        "is_current_stream_capturing": lambda: False,
    }


def of_any_device(name: str, original: Any, of_cuda: Callable[..., Any]) -> type:
    """Return a class such as `torch.Stream` that makes an object of the virtual GPU for `cuda`, else torch's own."""

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, VirtualStream if name == "Stream" else VirtualEvent))

    def make(cls: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device is None or isinstance(device, int) or torch.device(device).type == "cuda":
            return of_cuda(device, *args, **kwargs)
        return original(device, *args, **kwargs)

    return Meta(name, (), {"__new__": make, "__module__": "torch"})
