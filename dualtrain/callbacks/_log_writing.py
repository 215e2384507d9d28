"""Shared behaviour of callbacks that write logs: copying, and the end of a run."""

from __future__ import annotations

from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext


class LogWriting(Callback):
    """A callback whose copies share its settings but not its open log.

    The state of a run is kept in attributes with a leading underscore, which are not copied or pickled.
    """

    _resuming = False
    """Whether the next run continues a log; set by ``load_state_dict``."""

    def _forget_run(self) -> None:
        """Reset the state of a run to its initial values."""
        raise NotImplementedError

    def on_teardown(self, run_context: RunContext) -> None:
        self._end_log()

    def __exit__(self, *error: Any) -> None:
        """Close the log if a loop calls the events by hand, without teardown."""
        self._end_log()

    def _end_log(self) -> None:
        """Write pending rows and close the log; do nothing if there is no open log."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()
