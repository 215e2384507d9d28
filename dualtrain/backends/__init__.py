"""The table of backends, and the lookup of an object's backend."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, NamedTuple

from dualtrain._lazy import loaded, resolve
from dualtrain.errors import ArgumentTypeError, ArgumentValueError
from dualtrain.protocol import Backend

ENTRY_POINT_GROUP = "dualtrain.backends"


class _Entry(NamedTuple):
    backend: str
    """``module:attribute`` of the Backend object."""
    marker: str
    """``module:attribute`` of an object that exists if the framework is imported."""
    callback_base: str | None = None
    """``module:attribute`` of the framework's own callback base class, if it has one."""


_IN_TREE = {
    "torch": _Entry("dualtrain.backends.torch.backend:BACKEND", "torch:Tensor"),
    "mindspore": _Entry(
        "dualtrain.backends.mindspore.backend:BACKEND", "mindspore:Tensor", "mindspore.train:Callback"
    ),
}


def find_backend(obj: Any, *, missing_ok: bool = False) -> Any:
    """Return the backend of a name, or of a network, optimizer or tensor.

    No framework is imported for the lookup: an object can only belong to an imported one.
    External backends register a Backend object under the entry point group
    ``dualtrain.backends``.

    Args:
        obj: A backend's name, or a native object.
        missing_ok: Return None if there is none.

    Raises:
        ArgumentValueError: No backend has this name.
        ArgumentTypeError: The object does not belong to a known framework.
    """
    if isinstance(obj, str):
        return _by_name(obj, missing_ok)
    for entry in _IN_TREE.values():
        if loaded(entry.marker) is not None:
            backend: Backend = resolve(entry.backend)
            if backend.owns(obj):
                return backend
    if obj is not None:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                backend = point.load()
            except ImportError:  # its framework is not installed, so it cannot own the object
                continue
            if backend.owns(obj):
                return backend
    if missing_ok:
        return None
    raise ArgumentTypeError(
        f"expected an object of one of {', '.join(backend_names())}, but got {type(obj).__name__}."
    )


def loaded_backends() -> list[Any]:
    """Return the in-tree backends whose framework is imported."""
    return [resolve(e.backend) for e in _IN_TREE.values() if loaded(e.marker) is not None]


def backend_names() -> list[str]:
    """Return the names of all backends, with or without an installed framework."""
    return [*_IN_TREE, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]


def callback_bases() -> tuple[type, ...]:
    """Return the callback base classes of the imported frameworks."""
    bases = (loaded(entry.callback_base) for entry in _IN_TREE.values() if entry.callback_base)
    return tuple(base for base in bases if base is not None)


def _by_name(name: str, missing_ok: bool) -> Any:
    if name in _IN_TREE:
        return resolve(_IN_TREE[name].backend)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return point.load()
    if missing_ok:
        return None
    raise ArgumentValueError(f"no backend is called {name!r}; there are {', '.join(backend_names())}.")
