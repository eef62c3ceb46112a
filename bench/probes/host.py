"""What else ran on the machine during a stretch of time."""

from __future__ import annotations

from typing import Any, Self


class HostLoad:
    result: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def merge(ranks: list[Any]) -> dict[str, Any] | None:
    return None
