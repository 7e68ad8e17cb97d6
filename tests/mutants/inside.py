"""What runs in a room's copy of the project: mutmut's own steps, less those that a chunk need not
repeat. (`mutmut run` first runs each test without a mutant, every time, and tries the quick mutants
first, so that a chunk would be no sample.)"""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic

from mutmut import __main__ as mutmut
from mutmut.state import state
from mutmut.workers.isolation import get_mutant_runner


def generate() -> None:
    """Write the mutants of what changed, and know which functions there are."""
    mutmut.set_mutant_under_test("mutant_generation")
    mutmut.copy_src_dir()
    mutmut.copy_also_copy_files()
    mutmut.create_mutants(1)


def try_mutants(names: list[str], seconds: float, processes: int) -> None:
    """Run the tests that reach each mutant, in this order, until the time is up. The first call
    runs all tests once to see which reach which function."""
    end = monotonic() + seconds
    generate()
    mutmut.setup_source_paths()
    runner = get_mutant_runner(processes)
    mutmut.collect_or_load_stats(runner, apply_config_invalidation=True)
    listed, _ = mutmut.collect_source_file_mutation_data(mutant_names=names)
    data = {name: of_file for of_file, name, _ in listed}
    mutmut.set_mutant_under_test("")
    runner.startup()
    settings = mutmut.config()
    for name in names:
        while not runner.has_capacity():
            mutmut._register_mutant_result(runner.wait_for_result(), data)
        if monotonic() > end:
            break
        function = mutmut.mangled_name_from_mutant_name(name)
        tests = sorted(
            state().tests_by_mangled_function_name.get(function, ()),
            key=lambda test: state().duration_by_test[test],
        )
        seconds_of_tests = sum(state().duration_by_test[test] for test in tests)
        limit = (seconds_of_tests + settings.timeout_constant) * settings.timeout_multiplier
        runner.submit(name, tests, round(2 * limit), seconds_of_tests)
    runner.signal_work_complete()
    while runner.pending_count():
        mutmut._register_mutant_result(runner.wait_for_result(), data)
    runner.shutdown()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # this folder's modules are no packages
    if len(sys.argv) == 1:
        generate()
    else:
        minutes, processes, *names = sys.argv[1:]
        try_mutants(names, 60 * float(minutes), int(processes))
