"""``dt.Model``: find the backend of a network and build that backend's Model."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from dualtrain.backends import find_backend
from dualtrain.errors import ArgumentTypeError


class Model(metaclass=ABCMeta):  # noqa: B024 - for register(), nothing is abstract
    """Train, fit, evaluate and predict with a network of either framework.

    ``dt.Model(...)`` returns the Model of the network's backend, for which
    ``isinstance(model, dt.Model)`` holds; for a ``mindspore.nn.Cell`` it is also a
    ``mindspore.train.Model``. The arguments up to ``metrics`` are positional, with the
    order, meaning and defaults of MindSpore's Model.

    Args:
        network: A ``torch.nn.Module`` or a ``mindspore.nn.Cell``.
        loss_fn: Called with the network's output and the label; gives the loss.
        optimizer: The framework's own optimizer over the network's parameters.
        metrics: Names (``{"acc", "loss"}``), or a mapping name -> metric object. None:
            evaluation gives ``eval_loss`` alone.
        backend: ``"torch"`` or ``"mindspore"`` to insist on one; None: by the network's type.
        train_step: ``callable(network, batch)`` returning the loss, or a mapping with it under
            ``"loss"``; replaces ``loss_fn``. In MindSpore's GRAPH mode it is compiled.
        **native: What the backend's own Model takes.

    Raises:
        ArgumentTypeError: The network is of no known framework, or of another one than
            ``backend`` or the optimizer.
        ArgumentValueError: A metric is unknown, or the optimizer has none of the network's
            parameters.
    """

    def __new__(cls, network: Any, *args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        found = None if isinstance(network, str) else find_backend(network, missing_ok=True)
        if found is None:
            raise ArgumentTypeError(
                f"Model needs a torch.nn.Module or a mindspore.nn.Cell as its network, "
                f"but got {_describe(network)}."
            )
        if backend is not None and find_backend(backend) is not found:
            raise ArgumentTypeError(
                f"Model was asked for backend={backend!r}, but {type(network).__name__} "
                f"is a network of {found.name}."
            )
        model_class = found.model_class()
        Model.register(model_class)
        return model_class(network, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise ArgumentTypeError(
            f"class {cls.__name__}: dt.Model cannot be subclassed, since the object it makes is the "
            f"backend's Model; pass train_step=... to change how a batch is trained on."
        )

    # What every backend's Model offers; here for readers and type checkers.

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        *,
        initial_epoch: int = 0,
        **native: Any,
    ) -> None:
        """Train up to ``epoch`` epochs, without evaluation.

        Args:
            epoch: The epoch to end at, counted from 1.
            train_dataset: Any iterable of batches, sized or not; a batch is ``(inputs..., label)``,
                a mapping, or what ``train_step`` takes. On MindSpore a ``mindspore.dataset``
                or the same iterable of numpy batches.
            callbacks: One callback, a list or a tuple.
            initial_epoch: Epochs done before; training starts with the one after.
        """
        raise NotImplementedError

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | list[int] = 1,
        callbacks: Any = None,
        *,
        initial_epoch: int = 0,
        **native: Any,
    ) -> None:
        """Train as ``train`` does, and evaluate every ``valid_frequency`` epochs or at those listed."""
        raise NotImplementedError

    def eval(self, valid_dataset: Any, callbacks: Any = None, **native: Any) -> dict[str, Any]:
        """Evaluate once and return the metrics (``eval_loss`` if the model has none)."""
        raise NotImplementedError

    def predict(self, *inputs: Any) -> Any:
        """Return the network's output in evaluation mode, without gradients."""
        raise NotImplementedError


def _describe(obj: Any) -> str:
    return f"the class {obj.__name__}" if isinstance(obj, type) else f"{type(obj).__name__} {obj!r:.60}"
