"""Private names of MindSpore and CPython that dualtrain uses, each with a fallback.

=====================================  =========  ============================  ============================
Name                                   Seen in    Use                           Without it
=====================================  =========  ============================  ============================
``train.model._pynative_executor``     2.7-2.10   Stop recording after an       The next run may record its
                                                  error inside a Cell           forward pass twice
                                                  (PYNATIVE mode)
``common._no_grad``                    2.7-2.10   Probe without recording       Probes take more memory
``common.hook_handle._HOOK_VERSION``   2.7-2.10   Keep a compiled graph after   The graph is compiled again
                                                  a probe with hooks
``ops.function.nn_func.softmax_impl``  2.7-2.10   Find attention that calls     Only ``ops.Softmax`` is
                                                  ``ops.softmax``               found
``Model._train_network``               2.7-2.10   Train with our train step     The capabilities of our
                                                                                train step are absent
``Model._build_train_network``         2.7-2.10   Build MindSpore's train step  ``train_step`` is refused
                                                  around ``train_step``
``Model._network``                     2.7-2.10   The same                      The same
``Model._update_metrics``              2.7-2.10   Metrics of a network that     An error of MindSpore's
                                                  returns a loss alone
``_signal.signal`` (CPython)           3.10-3.13  Set a signal handler twice    ``signal.signal``, at ten
                                                  per step                      times the cost
=====================================  =========  ============================  ============================

``_build_train_network`` and ``_update_metrics`` are methods that ``MindSporeModel`` overrides.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mindspore import nn

_TRAIN_NETWORK = "_train_network"
_NETWORK = "_network"
_HOOK_VERSION = "_HOOK_VERSION"
_SOFTMAX = "softmax_impl"


def stop_recording() -> None:
    """Clear the operations that PYNATIVE mode has recorded before an error inside a Cell."""
    executor = _find("mindspore.train.model", "_pynative_executor")
    clear = getattr(executor, "clear_res", None)
    if clear is not None:
        clear()


def no_grad() -> AbstractContextManager[Any]:
    """Return a context in which PYNATIVE mode does not record operations."""
    context = _find("mindspore.common", "_no_grad")
    return nullcontext() if context is None else context()


@contextmanager
def same_hook_version() -> Iterator[None]:
    """Restore the counter that MindSpore increments when hooks change."""
    module = _module("mindspore.common.hook_handle")
    version = getattr(module, _HOOK_VERSION, None)
    try:
        yield
    finally:
        if version is not None:
            setattr(module, _HOOK_VERSION, version)


@contextmanager
def replaced_softmax(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the function behind ``ops.softmax`` inside this context.

    Args:
        replace: Receives the function and returns its replacement.
    """
    module = _module("mindspore.ops.function.nn_func")
    function = getattr(module, _SOFTMAX, None)
    if function is None:
        yield
        return
    setattr(module, _SOFTMAX, replace(function))
    try:
        yield
    finally:
        setattr(module, _SOFTMAX, function)


def has_train_network(model: Any) -> bool:
    """Return whether the train step of MindSpore's Model can be replaced."""
    return hasattr(model, _TRAIN_NETWORK)


def replace_train_network(model: Any, cell: nn.Cell) -> None:
    """Replace the train step of MindSpore's Model, if it can be replaced."""
    if has_train_network(model):
        setattr(model, _TRAIN_NETWORK, cell)


@contextmanager
def replaced_network(model: Any, network: nn.Cell) -> Iterator[bool]:
    """Replace the network of MindSpore's Model inside this context, and yield whether that is possible."""
    if not hasattr(model, _NETWORK):
        yield False
        return
    previous = getattr(model, _NETWORK)
    setattr(model, _NETWORK, network)
    try:
        yield True
    finally:
        setattr(model, _NETWORK, previous)


def signal_setter() -> Callable[[int, Any], Any]:
    """Return a function that sets a signal handler, without the conversion of arguments to enums."""
    setter: Callable[[int, Any], Any] = _find("_signal", "signal") or signal.signal
    return setter


def _find(module: str, name: str) -> Any:
    return getattr(_module(module), name, None)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
