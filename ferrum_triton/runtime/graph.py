"""Decode steps captured once and replayed: CUDA graphs by key, and the state they read.

A replay repeats the kernels of the capture on the same memory, so what changes from step to step
must lie in device tensors: :class:`DecodeState` holds the token, its position and the length of the
cache, and the ops take them as ``ids``, ``positions``, ``slots`` and ``kv_lens``::

    graph = Graph(backend.device)
    graph.set_decode_state(token, step)
    logits = graph.capture("decode", lambda: decode(graph.state), owners=cache.tensors)
    graph.set_decode_state(next_token, step + 1)
    graph.replay("decode")  # logits now hold the next step's

Where there are no device graphs (a CPU) a capture is a run and a replay runs the step again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ferrum_triton.backends import DISPATCH, get_backend
from ferrum_triton.errors import FerrumError, InputError
from ferrum_triton.runtime.context import capture_in_flight, recording, refuse_in_capture

Outputs: TypeAlias = Tensor | tuple[Tensor, ...] | None

INT32_MAX = 2**31 - 1

HISTORY = 2
"""Steps whose tokens a state keeps: one is read while the next runs."""


class DecodeState:
    """What changes from one decode step to the next, in device memory.

    Attributes:
        token: [batch] int32, the tokens fed.
        pos: [batch] int32, their positions.
        kv_len: [batch] int32, keys visible to them: their own included.
        history: [HISTORY, batch] int32, what steps chose: :meth:`advance` notes a row's token after
            position p at [p mod HISTORY], where it stays for HISTORY steps. The host's memory where
            the device is a CUDA GPU, to be read once an event behind the step has passed.
    """

    def __init__(self, device: torch.device | str = "cpu", batch: int = 1) -> None:
        # One tensor, so that setting the state is one copy.
        self._packed = torch.zeros(3, batch, dtype=torch.int32, device=device)
        self.token, self.pos, self.kv_len = self._packed.unbind()
        pinned = self._packed.is_cuda
        self.history = torch.zeros(
            HISTORY, batch, dtype=torch.int32, device="cpu" if pinned else device, pin_memory=pinned
        )

    def set(self, token: int | Sequence[int], step: int | Sequence[int]) -> None:
        """Feed ``token`` at position ``step``; one of each per sequence, or the same for all.

        A step of -1 is padding: its position is -1 and its kv_len 0, which ops skip.

        Raises:
            InputError: a number is negative or past int32, or there is one per sequence too many.
        """
        refuse_in_capture("set_decode_state", self._packed.device, "Set it before the replay.")
        tokens, steps = self._spread("token", token, 0), self._spread("step", step, -1)
        lens = [value + 1 for value in steps]
        values = torch.tensor([tokens, steps, lens], dtype=torch.int32)
        # Pageable memory is read before the call returns, so this neither waits nor races.
        self._packed.copy_(values, non_blocking=True)

    def advance(self, tokens: Tensor) -> None:
        """Feed what a step chose at the next positions; for the end of a captured step.

        Args:
            tokens: [n] int32, of the first n sequences. Padding stays where it is.
        """
        count = tokens.shape[0]
        backend = get_backend(DISPATCH[self._packed.device.type.upper()])
        backend.advance_rows(self._packed[:, :count], tokens, self.history[:, :count])

    def _spread(self, name: str, value: int | Sequence[int], least: int) -> list[int]:
        batch = self._packed.shape[1]
        values = [value] * batch if isinstance(value, int) else list(value)
        if len(values) != batch:
            _reject(name, f"{len(values)} numbers", f"one, or {batch}")
        bad = next((v for v in values if not least <= v < INT32_MAX), None)
        if bad is not None:
            _reject(name, str(bad), f"{least} to {INT32_MAX - 1}")
        return values


@dataclass(frozen=True)
class _Captured:
    replay: Callable[[], None]
    outputs: Outputs
    pool: Any
    finalizers: list[weakref.finalize]


class Graph:
    """Captured steps by key, and the decode state they share.

    Attributes:
        state: the tensors that the steps read; see :meth:`set_decode_state`.
        device_state_mode: whether a step that also runs outside of a graph should pass the state's
            tensors to the ops rather than host numbers. On while a step is captured or replayed.
    """

    def __init__(self, device: torch.device | str = "cpu", batch: int = 1) -> None:
        self.device = torch.device(device)
        self.state = DecodeState(self.device, batch)
        self.device_state_mode = False
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None

    def set_decode_state(self, token: int | Sequence[int], step: int | Sequence[int]) -> None:
        """Set token, position = step and kv_len = step + 1 for the next step; see DecodeState."""
        self.state.set(token, step)

    def capture(
        self, key: Hashable, step: Callable[[], Outputs], owners: Iterable[Any] = ()
    ) -> Outputs:
        """Run ``step`` once, capture it and keep it under ``key``, in place of an earlier one.

        The run before the capture compiles the step's kernels and loads its libraries, neither of
        which a capture may do; its effects are real. What the step does on the host happens at the
        capture only, so it may change device memory and nothing else.

        Args:
            key: the name that tells the captures apart, e.g. the batch size.
            step: enqueues the work; returns tensors or None.
            owners: objects whose memory the step uses, e.g. ``cache.tensors``. When one of them is
                freed or reallocated the capture is dropped, for a replay would use that memory.

        Returns:
            The step's outputs: static tensors, holding what the run before the capture computed.
            Each replay overwrites them; they are valid until the next replay of any key.

        Raises:
            FerrumError: the step does what cannot be captured: it waits for the device, uploads
                host data, or launches a kernel that the run before did not compile.
        """
        refuse_in_capture("capture", self.device, "Captures do not nest.")
        self.reset(key)
        replay, outputs = self._record_cuda(step) if self._on_cuda else self._record(step)
        this = weakref.ref(self)
        finalizers = [weakref.finalize(owner, _drop_capture, this, key) for owner in owners]
        for finalizer in finalizers:
            finalizer.atexit = False
        self._captured[key] = _Captured(replay, outputs, self._pool, finalizers)
        return outputs

    def replay(self, key: Hashable) -> bool:
        """Repeat the step captured under ``key``, and say whether there was one."""
        captured = self._captured.get(key)
        if captured is None:
            return False
        refuse_in_capture("replay", self.device, "Captures do not nest.")
        captured.replay()
        return True

    def outputs(self, key: Hashable) -> Outputs:
        """The static outputs captured under ``key``; None where there is no such capture."""
        captured = self._captured.get(key)
        return None if captured is None else captured.outputs

    def reset(self, key: Hashable) -> None:
        """Drop the capture under ``key``, if there is one."""
        captured = self._captured.pop(key, None)
        if captured is not None:
            for finalizer in captured.finalizers:
                finalizer.detach()

    def reset_all(self) -> None:
        """Drop every capture."""
        for key in list(self._captured):
            self.reset(key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def capture_in_flight(self) -> bool:
        """Whether a step is being captured on this device now."""
        return capture_in_flight(self.device)

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _run(self, step: Callable[[], Outputs]) -> Outputs:
        before, self.device_state_mode = self.device_state_mode, True
        try:
            return step()
        finally:
            self.device_state_mode = before

    def _record(self, step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run the step as a capture would, and return how to run it again onto the same outputs."""
        token = recording.set(True)
        try:
            outputs = self._run(step)
        finally:
            recording.reset(token)
        return lambda: _overwrite(outputs, self._run(step)), outputs

    def _record_cuda(self, step: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        # One pool for all captures, as no two of them run at the same time. torch closes a pool
        # with the last graph that uses it.
        if not any(captured.pool == self._pool for captured in self._captured.values()):
            self._pool = torch.cuda.graph_pool_handle()
        failure: BaseException | None = None
        with torch.cuda.device(self.device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):  # what libraries set up on first use is set up aside too
                computed = self._run(step)
            current.wait_stream(aside)
            recorded = torch.cuda.CUDAGraph()
            try:
                # The outer scope restores the stream, which torch forgets when a capture fails.
                with (
                    torch.cuda.stream(current),
                    torch.cuda.graph(recorded, pool=self._pool, capture_error_mode="thread_local"),
                ):
                    try:
                        outputs = self._run(step)
                    except BaseException as error:
                        failure = error
                        raise
            except BaseException as error:
                self._pool = None  # a failed capture may leave its pool unusable
                cause = failure or error
                if isinstance(cause, FerrumError) or not isinstance(cause, RuntimeError):
                    raise cause from None
                raise FerrumError(
                    f"the step cannot be captured in a graph: {cause}. It may not wait for the "
                    "device or read results on the host."
                ) from cause
            _overwrite(outputs, computed)
        return recorded.replay, outputs


def _overwrite(outputs: Outputs, new: Outputs) -> None:
    with torch.inference_mode():
        for kept, value in zip(_as_tuple(outputs), _as_tuple(new), strict=True):
            kept.copy_(value)


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    if outputs is None:
        return ()
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _drop_capture(graph: weakref.ref[Graph], key: Hashable) -> None:
    target = graph()
    if target is not None:
        target.reset(key)


def _reject(argument: str, got: str, allowed: str) -> None:
    raise InputError("set_decode_state", argument, got, allowed, "Pass one per sequence.")
