"""Back-pressure: how many tokens may be under way at once."""

from __future__ import annotations

import threading
from collections import deque

from rlhf_scan import EngineError


class TokenBudget:
    """At most `limit` tokens in flight. Those who wait enter in the order in which they came; one larger than the limit enters alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self._closed = False
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def acquire(self, tokens: int, timeout: float) -> None:
        """Wait for room, at most `timeout` seconds; raises EngineError where there is none by then, or when the budget is closed."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                entered = self._changed.wait_for(lambda: self._closed or (self._waiting[0] is ticket and self._fits(tokens)), timeout)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            if self._closed:
                raise EngineError("the engine or pool was closed; create a new one")
            if not entered:
                raise EngineError(
                    f"no room for {tokens} more tokens within {timeout:g} s: {self.in_flight} are in flight and "
                    f"max_tokens_in_flight is {self.limit}; wait for results, raise that limit or add actors"
                )
            self.in_flight += tokens

    def release(self, tokens: int) -> None:
        """Give back what was acquired, all or a part."""
        with self._changed:
            self.in_flight -= tokens
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more, and wait until all are out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.in_flight == 0)

    def _fits(self, tokens: int) -> bool:
        return self.in_flight == 0 or self.in_flight + tokens <= self.limit
