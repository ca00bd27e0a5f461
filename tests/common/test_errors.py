"""Errors that an operator can mend share one base class, with an exit status."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from quire.engine import common, wire
from quire.engine.common.errors import OperatorError
from quire.engine.common.settings import SettingsError

MODULES = [
    module.name
    for package in (common, wire)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]


@pytest.mark.parametrize("name", MODULES)
def test_every_error_of_ours_is_for_the_operator(name: str) -> None:
    module = importlib.import_module(name)
    errors = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Exception)]
    for error in errors:
        if error.__module__.startswith("quire."):
            assert issubclass(error, OperatorError), f"{error.__qualname__}: derive it from OperatorError"


def test_a_bad_setting_has_an_exit_status_of_its_own() -> None:
    assert (OperatorError.exit_status, SettingsError.exit_status) == (1, 2)
