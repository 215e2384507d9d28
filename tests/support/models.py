"""The model that most tests train."""

from __future__ import annotations

from typing import Any

import dualtrain as dt


def make(
    engine: Any, network: Any = None, *, rate: float = 0.1, optimizer: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Return a network and its model, with an engine's loss.

    Args:
        engine: An engine of engines.py.
        network: The network; a ``Weight`` of 1 by default.
        rate: The learning rate of the default optimizer.
        optimizer: The optimizer; SGD by default.
        **options: Further arguments of ``dt.Model``.
    """
    network = engine.weight() if network is None else network
    optimizer = engine.sgd(network, rate) if optimizer is None else optimizer
    return network, dt.Model(network, engine.loss_fn(), optimizer, **options)
