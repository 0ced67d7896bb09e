"""What an import of the package loads, and how it leaves the garbage collector."""

import gc
import time

import pytest
from programs import printed_by

from bullet_graph._imports import load

HEAVY = {"torch", "triton", "flashinfer", "transformers", "cuda", "numpy", "rich", "matplotlib", "fastapi"}


def test_help_loads_no_large_library() -> None:
    code = (
        "import sys, bullet_graph\n"
        "from bullet_graph.cli.main import main\n"
        "for group in [], ['bench'], ['capture']:\n"
        "    main([*group, '--help'], standalone_mode=False)\n"
        "main(['--version'], standalone_mode=False)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    began_s = time.perf_counter()
    assert printed_by(code).splitlines()[-1] == "[]"
    # On an idle machine 0.2 s; importing torch alone takes far longer than this bound on any.
    assert time.perf_counter() - began_s < 5


def test_the_engine_needs_torch_but_no_gpu_library_and_leaves_the_collector_running() -> None:
    loaded = "print(sorted({'torch', 'triton', 'flashinfer', 'transformers', 'cuda'} & set(sys.modules)))\n"
    code = (
        "import gc, sys, bullet_graph; frozen = gc.get_freeze_count()\n"
        "assert 'torch' not in sys.modules\n"
        "assert bullet_graph.Engine.__module__ == 'bullet_graph.engine.engine'\n"
        f"{loaded}print(gc.isenabled(), gc.get_freeze_count() - frozen)"
    )
    # A CUDA build of torch imports `cuda` itself.
    assert printed_by(code) == printed_by(f"import sys, torch; {loaded}") + "True 0\n"


@pytest.mark.parametrize(("before", "left"), [("gc.disable()", "False 0"), ("gc.freeze()", "True ")])
def test_the_collector_is_as_it_was(before: str, left: str) -> None:
    code = f"{before}; bullet_graph.RequestMetrics; print(gc.isenabled(), gc.get_freeze_count() - frozen)"
    printed = printed_by(f"import gc, bullet_graph; frozen = gc.get_freeze_count(); {code}")
    assert printed.startswith(left)
    if before == "gc.freeze()":
        assert int(printed.split()[1]) > 0, "what was frozen stays so"


def test_an_import_that_fails_leaves_the_collector_running() -> None:
    with pytest.raises(ImportError):
        load("bullet_graph.no_such_module", "name")
    assert gc.isenabled()
