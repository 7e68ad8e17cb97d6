"""Names a failed test when it fails: a run that is ended from outside has no summary."""

from __future__ import annotations

import pytest


class Told:
    """Writes between the dots of the processes that run the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.writer = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            cause = str(crash.message if crash else report.longrepr).partition("\n")[0]
            self.writer.line(f"\nFAILED ({report.when}) {report.nodeid}: {cause}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):  # a run in one process is short
        config.pluginmanager.register(Told(config))
