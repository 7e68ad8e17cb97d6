"""Generated mutants of a room's code, and which of them no test notices.

mutmut makes the mutants and runs, for each, the tests that reach the mutated function. Everything
happens in a copy of the project, .mutants/ROOM/, where a later call continues.
"""
