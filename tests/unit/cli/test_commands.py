"""The command `syncvar`: its own options."""

import platform

import numpy as np
import pytest

import syncvar
from syncvar import _native
from syncvar.cli.commands import main


@pytest.mark.parametrize(
    ("missing", "shown"), [("", "yes"), ("no compiler was found", "no: no compiler was found")]
)
def test_the_version_shows_whether_the_c_extension_is_there(monkeypatch, capsys, missing, shown):
    monkeypatch.setattr(_native, "missing_reason", lambda: missing)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == (
        f"syncvar {syncvar.__version__}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}\nC extension: {shown}\n"
    )
