"""What the callbacks that write logs do alike when they are copied."""

from __future__ import annotations

from typing import Any

from dualtrain.callback import Callback


class LogWriting(Callback):
    """A callback whose copies have its settings and no part in a running log.

    What it keeps of a run, in attributes that begin with an underscore, stays out of copies and pickles.
    """

    _resuming = False
    """Whether the next run continues a log, as ``load_state_dict`` has said."""

    def _forget_run(self) -> None:
        """Set what is kept of a run to what it is before one."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_run()
