"""Where ops are enqueued: a device, its stream, and the scope that selects a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from ferrum_triton.errors import FerrumError, InputError

# Set while a step is recorded where there are no device graphs (runtime/graph.py), so that what
# cannot be captured on a GPU fails on a CPU too.
recording: ContextVar[bool] = ContextVar("ferrum_graph_recording", default=False)


class Context:
    """A device and the stream on which this context's work is enqueued.

    Args:
        device: e.g. ``backend.device``.
        stream: None takes the device's current stream; devices other than CUDA have none.
    """

    def __init__(
        self, device: torch.device | str = "cpu", stream: torch.cuda.Stream | None = None
    ) -> None:
        self.device = torch.device(device)
        if stream is None and self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
        self.stream = stream

    def sync(self) -> None:
        """Wait for everything enqueued on the stream.

        Raises:
            FerrumError: a graph is being captured.
        """
        refuse_in_capture("sync", self.device, "Wait before the capture or after a replay.")
        if self.stream is not None:
            self.stream.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def sync_before_host_readback(self) -> None:
        """Make results on this stream safe to read from the host.

        ``tensor.cpu()`` waits for the current stream only, which need not be this one, and memory
        that host and device share is not waited for at all.
        """
        self.sync()

    @contextlib.contextmanager
    def scope(self) -> Iterator[Context]:
        """Enqueue the block's work on this context's stream; scopes nest and restore."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield self

    @property
    def graph_capture_in_flight(self) -> bool:
        """Whether a graph is being captured here: then nothing may synchronise."""
        with self.scope():
            return capture_in_flight(self.device)


@contextlib.contextmanager
def device_scope(ordinal: int | None) -> Iterator[None]:
    """Select a CUDA device for the block, on this thread; scopes nest and restore.

    Args:
        ordinal: None keeps the device. Without CUDA every ordinal does.

    Raises:
        InputError: the ordinal is negative, or CUDA has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else None
    if ordinal is not None and (ordinal < 0 or (count is not None and ordinal >= count)):
        allowed = "0 or more" if count is None else f"0 to {count - 1}"
        advice = "`ferrum-triton doctor` lists the devices."
        raise InputError("device_scope", "ordinal", str(ordinal), allowed, advice)
    if ordinal is None or count is None:
        yield
        return
    with torch.cuda.device(ordinal):
        yield


def capture_in_flight(device: torch.device) -> bool:
    """Whether work for ``device`` is being captured in a graph rather than run."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return recording.get()


def refuse_in_capture(what: str, device: torch.device, advice: str) -> None:
    """Raise :class:`FerrumError` if ``what`` is called while a graph is captured."""
    if capture_in_flight(device):
        raise FerrumError(
            f"{what} cannot be captured in a graph: a replay would not do it. {advice}"
        )
