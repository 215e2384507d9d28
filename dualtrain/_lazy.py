"""Import modules on first use, with a clear error for a missing optional package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dualtrain.errors import MissingDependencyError


def require(module: str, *, extra: str) -> ModuleType:
    """Import a module that belongs to an optional extra.

    Args:
        module: The module's dotted name.
        extra: The extra of dualtrain that installs it.

    Raises:
        MissingDependencyError: The module is not installed; the message has the command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # installed, but one of its own imports is missing
        raise MissingDependencyError(
            f"{module} is needed here and is not installed: pip install 'dualtrain[{extra}]'",
            name=error.name,
        ) from error


def loaded(target: str) -> Any:
    """Return ``module:attribute`` if the module has been imported already, else None.

    An object can only have a type of a framework that is already imported, so type checks
    never need to import one.
    """
    module, _, attribute = target.partition(":")
    return getattr(sys.modules.get(module), attribute, None)


def resolve(target: str) -> Any:
    """Import and return ``module:attribute``, or ``module`` itself."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def lazy_exports(
    package: str, table: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create a package's ``__getattr__``, ``__dir__`` and ``__all__`` from one table.

    Args:
        package: The package's ``__name__``.
        table: Public name -> ``module:attribute`` or ``module``.
    """

    def __getattr__(name: str) -> Any:
        if name not in table:
            _refuse_name_of_subpackage(package, table, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = resolve(table[name])
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *table})

    return __getattr__, __dir__, sorted(table)


def _refuse_name_of_subpackage(package: str, table: dict[str, str], name: str) -> None:
    """Raise ImportError if a package in the table exports the name.

    ``from package import name`` replaces the message of an AttributeError, but passes an ImportError on.
    """
    if name.startswith("_"):
        return
    for target in table.values():
        if ":" not in target and name in getattr(resolve(target), "__all__", ()):
            raise ImportError(f"{package} does not export {name}: use {target}.{name}.", name=target)
