"""Effects of importing the library, each in a fresh process: no thread, no logging, no needless torch."""

import subprocess
import sys

import pytest

from support.source_files import modules, name_of

PUBLIC_NAMES_MAX = 30

# Modules and packages that need an extra of the same name, which `make test` does not install.
EXTRAS = ("accelerate", "keras", "lightning", "ray", "transformers")


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_offbeat_loads_no_torch_starts_no_thread_and_sets_up_no_logging():
    code = (
        "import logging, sys, threading\n"
        "import offbeat\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('offbeat').handlers\n"
        "print('quiet')"
    )
    assert in_a_fresh_process(code) == "quiet"


def test_importing_every_module_starts_no_thread():
    names = ["offbeat." + name_of(path).removesuffix(".py").replace("/", ".") for path in modules()]
    names = [name for name in names if name.split(".")[1] not in EXTRAS]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, threading\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert threading.active_count() == 1, name\n"
        "print('quiet')"
    )
    assert in_a_fresh_process(code) == "quiet"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_module_that_needs_a_missing_extra_names_it(name):
    code = (
        "import importlib, sys\n"
        f"sys.modules[{name!r}] = None\n"
        "try:\n"
        f"    importlib.import_module('offbeat.{name}')\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert f"pip install offbeat[{name}]" in in_a_fresh_process(code)


def test_the_coordinator_needs_no_torch():
    code = (
        "import sys, offbeat.runtime.control.coordinator\n"
        "import offbeat.policies.membership.assembly, offbeat.policies.membership.lockstep\n"
        "print('torch' in sys.modules)"
    )
    assert in_a_fresh_process(code) == "False"


def test_a_parameter_server_needs_no_torch_until_a_client_has_tensors():
    code = "import sys, offbeat, offbeat.runtime.ps.server\noffbeat.PS\nprint('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"


def test_the_public_parameter_server_needs_torch_for_its_translations_only():
    code = (
        "import sys, offbeat.ps\n"
        "assert 'torch' not in sys.modules\n"
        "print(all(hasattr(offbeat.ps, name) for name in offbeat.ps.__all__))"
    )
    assert in_a_fresh_process(code) == "True"


def test_a_strategy_is_imported_without_the_others():
    code = (
        "import sys, offbeat.strategies as strategies\n"
        "assert not [name for name in sys.modules if name.startswith('offbeat.runtime')]\n"
        "strategies.AllReduce\n"
        "rooms = ('staleness', 'ps', 'hybrid', 'model_averaging')\n"
        "ours = [name.split('.') for name in sys.modules if name.startswith('offbeat.')]\n"
        "print([name for name in ours if name[-2] in rooms])"
    )
    assert in_a_fresh_process(code) == "[]"


def test_every_strategy_is_found_in_the_package():
    code = (
        "import offbeat.strategies as strategies\n"
        "assert set(dir(strategies)) == set(strategies.__all__)\n"
        "kinds = strategies.STRATEGIES.values()\n"
        "print(all(getattr(strategies, kind.__name__) is kind for kind in kinds))\n"
        "assert strategies.partial.PartialAllReduce is strategies.PartialAllReduce\n"
        "print(hasattr(strategies, 'NoStrategy'))"
    )
    assert in_a_fresh_process(code) == "True\nFalse"


def test_sparse_logistic_regression_needs_no_torch():
    code = "import sys, benchmarks.sparse_lr, offbeat.apps.sparse_lr.libsvm\nprint('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"


def test_the_root_exports_few_names_and_all_of_them_exist():
    import offbeat

    assert len(offbeat.__all__) <= PUBLIC_NAMES_MAX
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None
