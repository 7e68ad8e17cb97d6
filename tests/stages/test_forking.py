"""An engine's core comes from a process that has imported vLLM beside the one that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.needs import needs_vllm

from prefect_raybatch.stages.vllm import forking

FORKED = """
import json, multiprocessing, os, subprocess, sys
from prefect_raybatch.stages.vllm import forking

def tell(path):
    import psutil
    worker = [sys.executable, "-c", "print(open('/proc/self/environ').read().split('=')[0])"]
    first = subprocess.run(worker, capture_output=True, text=True).stdout.strip()
    preloaded = {"csv", "colorsys"} <= set(sys.modules)
    told = [psutil.Process().parent().cmdline(), dict(os.environ), preloaded, first]
    with open(path, "w") as file:
        json.dump(told, file)

if __name__ == "__main__":
    forking.PRELOAD, forking.PRELOAD_CORE = "csv", "colorsys"  # quicker than vLLM
    os.environ["GONE"] = "1"
    forking.begin_fork_server({})
    del os.environ["GONE"]
    os.environ["ADDED"] = "2"
    process = forking.ForkedContext().Process(target=tell, args=(sys.argv[1],))
    process.start()
    process.join()
    print(process.exitcode)
"""
BEGUN = """
import json, os, sys
from multiprocessing import forkserver
from prefect_raybatch.stages.vllm import forking

forking.PRELOAD, forking.PRELOAD_CORE = "csv", "colorsys"
forking.begin_fork_server(json.loads(sys.argv[1]))
print(forkserver._forkserver._forkserver_pid is not None, os.environ.get(forking.METHOD))
"""


def run(folder: Path, code: str, *args: str, **env: str) -> str:
    script = folder / "forks.py"
    script.write_text(code)
    plain = {k: v for k, v in os.environ.items() if k not in (forking.METHOD, forking.CORE_APART)}
    done = subprocess.run(
        [sys.executable, str(script), *args],
        env={**plain, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_forked_process_has_the_modules_of_the_server_and_its_makers_environment(
    tmp_path: Path,
) -> None:
    told = tmp_path / "told.json"
    assert run(tmp_path, FORKED, str(told)) == "0"
    parent, environment, preloaded, first = json.loads(told.read_text())
    assert "multiprocessing.forkserver" in " ".join(parent)
    assert preloaded
    assert first == forking.FIRST_VARIABLE  # so that its workers, too, can have titles
    assert "GONE" not in environment and environment["ADDED"] == "2"
    assert environment[forking.METHOD] == "spawn"  # of a core's workers


@pytest.mark.parametrize(
    ("arguments", "env", "begun"),
    [
        ({}, {}, "True spawn"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, {}, "True spawn"),
        ({"numa_bind": True}, {}, "False None"),
        ({"distributed_executor_backend": "ray"}, {}, "False None"),
        ({}, {forking.CORE_APART: "0"}, "False None"),
        ({}, {forking.METHOD: "fork"}, "False fork"),
    ],
)
def test_the_server_is_begun_where_a_core_is_spawned(
    arguments: dict[str, object], env: dict[str, str], begun: str, tmp_path: Path
) -> None:
    assert run(tmp_path, BEGUN, json.dumps(arguments), **env) == begun


CALLS = """
import os, sys, time, types
from prefect_raybatch.stages.vllm import forking

# Here, and in each process that is forked for this script.
plugins = sys.modules["vllm.plugins"] = types.ModuleType("vllm.plugins")
plugins.load_general_plugins = lambda: os.environ.update(LOADED="plugins")
sys.modules["vllm"] = types.ModuleType("vllm")

if __name__ == "__main__":
    forking.PRELOAD, forking.PRELOAD_CORE = "csv", "colorsys"
    forking.begin_fork_server({})
    made = forking.context_of_core()
    here = "colorsys" in sys.modules
    print(made.call(lambda: (os.environ["LOADED"], "colorsys" in sys.modules)), here)
    forking.CALL_SECONDS = 20  # of the last call, which returns nothing
    for fails in (lambda: 1 / 0, lambda: os._exit(0), lambda: time.sleep(600)):
        try:
            made.call(fails)
        except forking.CallFailed as error:
            print(repr(error.__cause__))
"""


def test_a_function_is_called_in_a_fork(tmp_path: Path) -> None:
    lines = run(tmp_path, CALLS).splitlines()
    assert lines == [
        "('plugins', True) False",
        "EOFError()",
        "EOFError()",
        "TimeoutError('no result in 20 s')",
    ]


INSPECTS = """
import os, shutil
from prefect_raybatch.stages.vllm import forking, internals

if __name__ == "__main__":
    forking.begin_fork_server({})
    from vllm.model_executor.models import registry

    registry._SUBPROCESS_COMMAND = ["false"]  # the program that vLLM starts
    asked = registry.ModelRegistry.models["LlamaForCausalLM"]
    for made in (forking.context_of_core(), None):
        shutil.rmtree(os.environ["VLLM_CACHE_ROOT"], ignore_errors=True)
        with internals._models_inspected_by(made):
            try:
                print(asked.inspect_model_cls().is_text_generation_model)
            except RuntimeError:
                print("a program is started")
"""


@pytest.mark.whole
@needs_vllm
def test_a_model_that_vllm_has_not_seen_is_inspected_in_a_fork(tmp_path: Path) -> None:
    lines = run(tmp_path, INSPECTS, VLLM_CACHE_ROOT=str(tmp_path / "cache")).splitlines()
    assert lines[-2:] == ["True", "a program is started"]


TITLED = """
import os, sys
from prefect_raybatch.stages.vllm.forking import FIRST_VARIABLE, take_environment

take_environment({"ADDED": "2", FIRST_VARIABLE: "1"})
import setproctitle
setproctitle.setproctitle("ray::IDLE")
print(open("/proc/self/cmdline").read().split(chr(0))[0], os.environ["ADDED"])
"""


def test_a_fork_of_a_process_with_the_first_variable_can_still_be_titled(tmp_path: Path) -> None:
    (tmp_path / "titled.py").write_text(TITLED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "titled.py")],
        env={forking.FIRST_VARIABLE: "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["ray::IDLE", "2"], done.stdout + done.stderr


@pytest.mark.whole
def test_all_that_a_core_needs_can_be_imported_without_cuda() -> None:
    code = (
        f"import sys, threading, torch; import {forking.PRELOAD} as preload; "
        f"import {forking.PRELOAD_CORE} as core; needed = (*preload.NEEDED, *core.CORE_NEEDED); "
        "print([n for n in needed if n not in sys.modules], torch.cuda.is_initialized(),"
        " threading.active_count());"
        "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore');"
        "print(open('/proc/self/cmdline').read().split('\\0')[0])"
    )
    # Ray hands the environment on in any order. What vLLM's import sets may come first in it, and
    # no title can be given once the first of it has been moved.
    environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    needed, title = done.stdout.splitlines()[-2:]
    assert needed == "[] False 1", done.stderr
    assert title.startswith("VLLM::EngineCore"), "the core bears the name of what started it"
