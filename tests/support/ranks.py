"""A backend of which only the rank is known."""

from __future__ import annotations


class Rank:
    """The part of a backend that says which rank this is."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __str__(self) -> str:
        return "ranked"

    def rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return 2

    def version(self) -> str:
        return "1"
