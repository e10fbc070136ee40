"""Ctrl-C and SIGTERM, also while a compile holds the main thread."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

EXIT_STATUS = 130
"""What a shell calls a command that SIGINT ended."""


class InterruptedJob(BaseException):
    """The job was asked to stop and has written what it had.

    No ``Exception``, so that Hydra ends a sweep with it instead of going on to the next job.
    """


class Interrupts:
    """Notices SIGINT and SIGTERM for as long as it is entered.

    The run asks ``requested`` before each step. Python runs signal handlers between instructions
    of the main thread only, and a compile is one call of many seconds: inside ``uninterruptible``
    a thread ends the process instead, after ``on_exit``.

    Args:
        on_exit: Called before the process is ended from the thread.
    """

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._requested = threading.Event()
        self._inside_call = threading.Event()
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether the job was asked to stop."""
        return self._requested.is_set()

    @contextmanager
    def uninterruptible(self) -> Iterator[None]:
        """Marks a long call that Python's own handlers can't interrupt.

        Raises:
            InterruptedJob: If the job was asked to stop meanwhile.
        """
        if self.requested:
            raise InterruptedJob
        self._inside_call.set()
        try:
            yield
        finally:
            self._inside_call.clear()
        if self.requested:
            raise InterruptedJob

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno())
        threading.Thread(target=self._watch, daemon=True, name="interrupts").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._previous:
            return
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._writer.close()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._requested.is_set() and number == signal.SIGINT:
            # A second Ctrl-C does not wait for the step.
            raise KeyboardInterrupt
        self._requested.set()

    def _watch(self) -> None:
        while self._reader.recv(1):
            if self._inside_call.is_set():
                self._on_exit()
                os._exit(EXIT_STATUS)
        self._reader.close()
