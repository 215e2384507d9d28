"""Sinks that are settings: equal by name, and shown so that they can be made again."""

from dualtrain.sinks import MemorySink


class ShownSink(MemorySink):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShownSink) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"__import__('shown_sinks').ShownSink({self.name!r})"
