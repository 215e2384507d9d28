"""Importing dualtrain, or any public name of it, imports no framework.

Each public name is imported in a process of its own, in which importing a framework is an error: so
these tests fail where a framework is imported, whether one is installed or not.
"""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dualtrain
from dualtrain import _lazy, errors
from dualtrain.errors import MissingDependencyError

FRAMEWORKS = ("torch", "mindspore")

GUARD = """
import sys

class Guard:
    tried = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            self.tried.append(name)

sys.meta_path.insert(0, Guard())
"""
# An import that is tried and forgiven, as for an availability flag, is found by the first of the two.
VERDICT = """
assert not Guard.tried, f"tried to import {Guard.tried}"
loaded = {name.partition(".")[0] for name in sys.modules} & set({forbidden})
assert not loaded, f"{loaded} entered sys.modules"
"""


def assert_imports_nothing_of(forbidden, statement):
    """Run a statement in a new interpreter and find none of the forbidden packages imported there."""
    source = (GUARD + statement + "\n" + VERDICT).replace("{forbidden}", repr(forbidden))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def lazy_packages():
    """Return the packages that export their names from a table: dualtrain and those it exports."""
    exported = [target for target in dualtrain._EXPORTS.values() if ":" not in target]
    modules = [dualtrain, *map(importlib.import_module, exported)]
    return [module for module in modules if hasattr(module, "_EXPORTS")]


PACKAGES = lazy_packages()
PUBLIC = [(package.__name__, name) for package in PACKAGES for name in package.__all__]


def test_importing_the_package_imports_no_framework_and_no_numpy():
    assert_imports_nothing_of((*FRAMEWORKS, "numpy"), "import dualtrain")


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{p}.{n}" for p, n in PUBLIC])
def test_a_public_name_imports_no_framework(package, name):
    assert_imports_nothing_of(FRAMEWORKS, f"from {package} import {name}")


def test_all_public_names_together_import_no_framework():
    statements = [f"from {package.__name__} import *" for package in PACKAGES]
    assert_imports_nothing_of(FRAMEWORKS, "\n".join(statements))


def framework_free_modules():
    """Return the modules outside the two backends' folders, which are to import no framework."""
    found = pkgutil.walk_packages(dualtrain.__path__, "dualtrain.", onerror=lambda name: None)
    apart = ("dualtrain.backends.", "dualtrain.__main__")
    return [module.name for module in found if not module.name.startswith(apart)]


def test_no_module_outside_the_backends_imports_a_framework():
    modules = framework_free_modules()
    assert {"dualtrain.backends", "dualtrain.loop", "dualtrain.model"} <= set(modules)
    assert_imports_nothing_of(FRAMEWORKS, "\n".join(f"import {name}" for name in modules))


def test_a_run_of_the_loop_without_an_engine_imports_no_framework():
    """A context that is asked for its backend looks at what is loaded and loads nothing."""
    assert_imports_nothing_of(
        FRAMEWORKS,
        "from dualtrain import RunContext\n"
        "context = RunContext({'optimizer': object(), 'net_outputs': 1.0})\n"
        "assert (context.backend, context.lr, context.loss, context.rank) == (None, None, 1.0, 0)\n",
    )


def test_the_guard_finds_what_it_looks_for():
    with pytest.raises(AssertionError, match=r"entered sys\.modules"):
        assert_imports_nothing_of(("json",), "sys.meta_path.pop(0)\nimport json")
    forgiven = "try:\n    import no_such_framework\nexcept ImportError:\n    pass"
    with pytest.raises(AssertionError, match="tried to import"):
        assert_imports_nothing_of(("no_such_framework",), forgiven)


def test_importing_the_package_loads_little():
    """It is to take less than 50 ms; that goes by what is loaded, while a time goes by the machine."""
    code = "import sys; before = set(sys.modules); import dualtrain; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    ours = [name for name in loaded if name.partition(".")[0] == "dualtrain"]
    assert len(ours) <= 4, ours
    assert len(loaded) <= 40, loaded
    assert not {"numpy", "asyncio", "inspect", "logging"}.intersection(loaded)


# The tables of exports.


def declared_for_type_checkers(package):
    """Return name -> target as a package's ``if TYPE_CHECKING`` block has it."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    blocks = [
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    found = {}
    for statement in (statement for block in blocks for statement in block):
        assert isinstance(statement, ast.ImportFrom), "a table's names are imported one by one"
        for alias in statement.names:
            assert alias.asname == alias.name, f"{alias.name} is exported to type checkers by `as` alone"
            is_module = statement.module == "dualtrain"
            found[alias.name] = f"{statement.module}{'.' if is_module else ':'}{alias.name}"
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_type_checkers_see_the_names_of_the_table(package):
    assert declared_for_type_checkers(package) == package._EXPORTS


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_all_is_the_table(package):
    own = ["__version__"] if package is dualtrain else []
    assert package.__all__ == sorted(package._EXPORTS) + own


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{p}.{n}" for p, n in PUBLIC])
def test_a_public_name_is_there_and_is_what_the_table_says(package, name):
    module = importlib.import_module(package)
    found = getattr(module, name)
    assert name in dir(module)
    if name in module._EXPORTS:
        assert found is _lazy.resolve(module._EXPORTS[name])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_a_name_that_is_not_public_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'no_such_name'"):
        _ = package.no_such_name
    assert not hasattr(package, "no_such_name")


NAMES_OF_SUBPACKAGES = [
    (package.__name__, name)
    for package in PACKAGES
    if package is not dualtrain
    for name in package.__all__
    if name not in dualtrain.__all__
]


@pytest.mark.parametrize(
    ("package", "name"), NAMES_OF_SUBPACKAGES, ids=[n for _, n in NAMES_OF_SUBPACKAGES]
)
def test_a_name_of_a_subpackage_is_an_error_that_says_where_it_is(package, name):
    sentence = f"^dualtrain does not export {name}: use {package}.{name}.$"
    with pytest.raises(ImportError, match=sentence):
        exec(f"from dualtrain import {name}")
    with pytest.raises(ImportError, match=sentence):
        getattr(dualtrain, name)


def test_the_contracts_names_are_public():
    assert {"Callback", "RunContext", "Event", "Model", "__version__"} <= set(dualtrain.__all__)
    assert {"callbacks", "sinks", "logs", "testing"} <= set(dualtrain.__all__)


def test_a_name_is_resolved_once():
    code = (
        "import dualtrain\n"
        "assert 'Callback' not in vars(dualtrain)\n"
        "first = dualtrain.Callback\n"
        "assert vars(dualtrain)['Callback'] is first\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Importing what is optional.


def test_a_module_that_is_there_is_returned():
    assert _lazy.require("json.decoder", extra="plot") is sys.modules["json.decoder"]


@pytest.mark.parametrize(
    ("module", "missing"),
    [("no_such_package", "no_such_package"), ("no_such_package.inner", "no_such_package")],
)
def test_a_module_that_is_not_installed_is_an_error_with_the_command(module, missing):
    with pytest.raises(MissingDependencyError) as caught:
        _lazy.require(module, extra="plot")
    assert f"{module} is needed here" in str(caught.value)
    assert "pip install 'dualtrain[plot]'" in str(caught.value)
    assert caught.value.name == missing


def test_a_module_that_is_broken_is_not_said_to_be_missing(tmp_path, monkeypatch):
    """Installing an extra does not help where the package is there and lacks something itself."""
    (tmp_path / "package_that_lacks_one.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package") as caught:
        _lazy.require("package_that_lacks_one", extra="plot")
    assert not isinstance(caught.value, MissingDependencyError)


def test_asking_what_is_loaded_loads_nothing(tmp_path, monkeypatch):
    (tmp_path / "package_to_probe.py").write_text("Tensor = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _lazy.loaded("package_to_probe:Tensor") is None
    assert "package_to_probe" not in sys.modules
    module = importlib.import_module("package_to_probe")
    assert _lazy.loaded("package_to_probe:Tensor") is module.Tensor
    assert _lazy.loaded("package_to_probe:Parameter") is None
    monkeypatch.delitem(sys.modules, "package_to_probe")


# The errors.


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ArgumentTypeError", TypeError),
        ("ArgumentValueError", ValueError),
        ("UnknownEventError", ValueError),
        ("CapabilityError", RuntimeError),
        ("MissingDependencyError", ImportError),
        ("LogInUseError", OSError),
        ("NonFiniteError", FloatingPointError),
        ("RunStateError", RuntimeError),
    ],
)
def test_an_error_is_also_of_the_builtin_kind_that_a_caller_would_catch(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.DualTrainError)


def test_every_error_of_the_package_has_one_parent():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert len(kinds) >= 8
    assert all(issubclass(kind, errors.DualTrainError) for kind in kinds)
