"""Counting what is not held for backward."""

from __future__ import annotations

import threading


class Tally:
    """Bytes that are not held for backward, by the module whose call made them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}

    def begin(self) -> None:
        """A new forward begins."""
        with self._lock:
            self._bytes.clear()

    def add(self, label: str, nbytes: int) -> None:
        """A storage of so many bytes is dropped."""
        with self._lock:
            self._bytes[label] = self._bytes.get(label, 0) + nbytes

    def by_label(self) -> dict[str, int]:
        """Bytes dropped in the latest forward, by module."""
        with self._lock:
            return dict(self._bytes)
