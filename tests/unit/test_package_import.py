"""What the import of the package leaves behind."""

import gc
import subprocess
import sys

import pytest

from bullet_graph._imports import collector_aside

AFTER = "import gc; {before}; import bullet_graph; print(gc.isenabled(), gc.get_freeze_count())"


@pytest.mark.parametrize(
    ("before", "left"), [("pass", "True 0"), ("gc.disable()", "False 0"), ("gc.freeze()", "True ")]
)
def test_the_collector_is_as_it_was(before: str, left: str) -> None:
    code = AFTER.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(left)
    if before == "gc.freeze()":
        assert int(done.stdout.split()[1]) > 0, "what was frozen stays so"


def test_an_import_that_fails_leaves_the_collector_running() -> None:
    with pytest.raises(ImportError), collector_aside():
        raise ImportError
    assert gc.isenabled()


def test_what_was_made_meanwhile_is_old() -> None:
    with collector_aside():
        made = [[] for _ in range(5000)]
    assert gc.get_count()[0] < 5000, "the next collection does not look through it"
    assert made
