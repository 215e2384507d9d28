"""One callback for PyTorch and MindSpore: MindSpore's lifecycle events on both engines.

>>> import dualtrain as dt
>>> model = dt.Model(network, loss_fn, optimizer, metrics={"acc"})      # doctest: +SKIP
>>> model.fit(5, train_data, valid_data, callbacks=[dt.callbacks.StepLogger()])  # doctest: +SKIP

Importing this package does not import a framework; each public name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualtrain._lazy import lazy_exports
from dualtrain._version import __version__ as __version__

if TYPE_CHECKING:
    from dualtrain import callbacks as callbacks
    from dualtrain import logs as logs
    from dualtrain import sinks as sinks
    from dualtrain import testing as testing
    from dualtrain.callback import Callback as Callback
    from dualtrain.context import RunContext as RunContext
    from dualtrain.events import Event as Event
    from dualtrain.model import Model as Model
    from dualtrain.run import Run as Run
    from dualtrain.seed import seed_everything as seed_everything

_EXPORTS = {
    "Callback": "dualtrain.callback:Callback",
    "Event": "dualtrain.events:Event",
    "Model": "dualtrain.model:Model",
    "Run": "dualtrain.run:Run",
    "RunContext": "dualtrain.context:RunContext",
    "callbacks": "dualtrain.callbacks",
    "logs": "dualtrain.logs",
    "seed_everything": "dualtrain.seed:seed_everything",
    "sinks": "dualtrain.sinks",
    "testing": "dualtrain.testing",
}

if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _EXPORTS)
    __all__ += ["__version__"]
