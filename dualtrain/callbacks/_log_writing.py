"""What the callbacks that write logs do alike: when they are copied, and at the end of a run."""

from __future__ import annotations

from typing import Any

from dualtrain.callback import Callback
from dualtrain.context import RunContext


class LogWriting(Callback):
    """A callback whose copies have its settings and no part in a running log.

    What it keeps of a run, in attributes that begin with an underscore, stays out of copies and pickles.
    """

    _resuming = False
    """Whether the next run continues a log, as ``load_state_dict`` has said."""

    def _forget_run(self) -> None:
        """Set what is kept of a run to what it is before one."""
        raise NotImplementedError

    def on_teardown(self, run_context: RunContext) -> None:
        self._end_log()

    def __exit__(self, *error: Any) -> None:
        """Close the log where a loop calls the events by hand, and calls no teardown."""
        self._end_log()

    def _end_log(self) -> None:
        """Write what is held back, and close the log. Harmless where there is none."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()
