"""``dt.Model``: find the backend of a network and build that backend's Model."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

from dualtrain.backends import find_backend
from dualtrain.errors import ArgumentTypeError

_NATIVE: Any = type("Native", (), {"__repr__": lambda self: "<MindSpore's own>"})()
"""Not given: MindSpore chooses, and distinguishes that from None."""


class Model(metaclass=ABCMeta):  # noqa: B024 - for register(), nothing is abstract
    """Train, fit, evaluate and predict with a network of either framework.

    ``dt.Model(...)`` returns the Model of the network's backend, for which
    ``isinstance(model, dt.Model)`` holds; for a ``mindspore.nn.Cell`` it is also a
    ``mindspore.train.Model``. The order, meaning and defaults of the positional arguments are those of
    MindSpore's Model. An argument that the network's backend does not have is refused by name.

    Args:
        network: A ``torch.nn.Module`` or a ``mindspore.nn.Cell``.
        loss_fn: Called with the network's output and the label; gives the loss.
        optimizer: The framework's own optimizer over the network's parameters; under
            ``automatic_optimization=False`` also a mapping name -> optimizer.
        metrics: Names (``{"acc", "loss"}``), or a mapping name -> metric object. None:
            evaluation gives ``eval_loss`` alone.
        eval_network: MindSpore: the Cell that evaluates, in place of network and loss.
        eval_indexes: MindSpore: the positions of loss, output and label in what ``eval_network`` returns.
        amp_level: MindSpore: its own level of mixed precision, ``"O0"`` to ``"O3"`` or ``"auto"``.
        boost_level: MindSpore: its own boost mode, ``"O0"`` to ``"O2"``.
        backend: ``"torch"`` or ``"mindspore"`` to insist on one; None: by the network's type.
        train_step: ``callable(network, batch)`` returning the loss, or a mapping with it under
            ``"loss"``; replaces ``loss_fn``. In MindSpore's GRAPH mode it is compiled.
        accumulate_steps: Batches per update.
        clip_norm: The largest norm of an update's gradients; larger ones are scaled down. None: any.
        lr_scheduler: PyTorch: a ``torch.optim.lr_scheduler``, stepped once per update, or
            ``{"scheduler": s, "interval": "update" | "epoch", "monitor": name}``; a
            ReduceLROnPlateau steps by epochs, with the metric that ``monitor`` names.
        amp: ``"fp16"`` for mixed precision with a loss scale: an update whose gradients overflow is
            skipped. ``"bf16"`` (PyTorch) needs no scale. None: full precision.
        automatic_optimization: PyTorch: False lets ``train_step(network, batch, run_context)`` drive
            ``run_context.zero_grad``, ``backward`` and ``optimizer_step``; ``loss_fn`` then serves
            evaluation alone.
        device: PyTorch: None: where the network's parameters are. ``"auto"``: the accelerator that
            ``torch.accelerator`` finds (cuda, npu, mps, ...), else the CPU. Or a device. The
            network is moved there once; batches are moved as they come.
        loss_scale_manager: MindSpore: its own loss scaling, or None for none.
        keep_batchnorm_fp32: MindSpore: overrides what ``amp_level`` does with BatchNorm.
        boost_config_dict: MindSpore: further options of ``boost_level``.
        acc_level: MindSpore: the older name of ``boost_level``.

    Raises:
        ArgumentTypeError: The network is of no known framework, or of another one than
            ``backend`` or the optimizer; or an argument is one of another backend's.
        ArgumentValueError: A metric is unknown, or the optimizer has none of the network's
            parameters.
    """

    def __new__(
        cls,
        network: Any,
        loss_fn: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        eval_network: Any = None,
        eval_indexes: list[int] | None = None,
        amp_level: str = "O0",
        boost_level: str = "O0",
        *,
        backend: str | None = None,
        train_step: Any = None,
        accumulate_steps: int = 1,
        clip_norm: float | None = None,
        lr_scheduler: Any = None,
        amp: str | None = None,
        automatic_optimization: bool = True,
        device: Any = None,
        loss_scale_manager: Any = _NATIVE,
        keep_batchnorm_fp32: bool | None = None,
        boost_config_dict: Any = None,
        acc_level: str | None = None,
    ) -> Model:
        arguments = dict(locals())
        for name in ("cls", "network", "backend"):
            del arguments[name]
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
        given = _given(arguments, model_class, found.name)
        if "backend" in inspect.signature(model_class).parameters:
            given["backend"] = found
        Model.register(model_class)
        model: Model = model_class(network, **given)
        return model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise ArgumentTypeError(
            f"class {cls.__name__}: dt.Model cannot be subclassed, since the object it makes is the "
            f"backend's Model; pass train_step=... to change how a batch is trained on."
        )

    # The methods of every backend's Model; here for readers and type checkers.

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        max_steps: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        """Train up to ``epoch`` epochs, without evaluation.

        Args:
            epoch: The epoch to end at, counted from 1.
            train_dataset: Any iterable of batches, sized or not; a batch is ``(inputs..., label)``,
                a mapping, or what ``train_step`` takes. On MindSpore a ``mindspore.dataset``
                or the same iterable of numpy batches.
            callbacks: One callback, a list or a tuple.
            dataset_sink_mode: MindSpore: sink the data to the device.
            sink_size: MindSpore: batches per sink; -1: a whole epoch.
            initial_epoch: Epochs done before; training starts with the one after.
            max_steps: Stop after so many batches of this run, in the ordinary way.
            limit_batches: Use at most so many batches per epoch and per evaluation, for a dry run.
        """
        raise NotImplementedError

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | list[int] = 1,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        max_steps: int | None = None,
        limit_batches: int | None = None,
    ) -> None:
        """Train as ``train`` does, and evaluate every ``valid_frequency`` epochs or at those listed."""
        raise NotImplementedError

    def eval(
        self,
        valid_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        *,
        limit_batches: int | None = None,
    ) -> dict[str, Any]:
        """Evaluate once and return the metrics (``eval_loss`` if the model has none)."""
        raise NotImplementedError

    def predict(self, *inputs: Any) -> Any:
        """Return the network's output in evaluation mode, without gradients."""
        raise NotImplementedError


_DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(Model.__new__).parameters.items()
}


def _given(arguments: dict[str, Any], model_class: Any, backend: str) -> dict[str, Any]:
    """Return the arguments that differ from their defaults.

    Raises:
        ArgumentTypeError: The backend's Model does not have one of them.
    """
    taken = inspect.signature(model_class).parameters
    given = {name: value for name, value in arguments.items() if _is_given(value, _DEFAULTS[name])}
    for name in given:
        if name not in taken:
            raise ArgumentTypeError(
                f"Model({name}=...) is an argument of another backend, and the network is one of "
                f"{backend}: leave it out."
            )
    return given


def _is_given(value: Any, default: Any) -> bool:
    if value is default:
        return False
    return not (type(value) is type(default) and isinstance(value, (str, int)) and value == default)


def _describe(obj: Any) -> str:
    return f"the class {obj.__name__}" if isinstance(obj, type) else f"{type(obj).__name__} {obj!r:.60}"
