"""Run the commands of docs/tutorials/first-run.md with a real engine, cluster, server and browser;
write their outputs and pictures into docs/. `make tour ARGS=Resume` starts at that heading."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from helpers.browser import browser_page, expect, picture
from helpers.pages import ROOT, Step, steps
from helpers.prefect_server import BIN, Prefect, prefect_server
from helpers.processes import below, held
from playwright.sync_api import Page

from tour import ELSEWHERE, TOUR_PAGE

PICTURES = ROOT / "docs/images"
FOLDER = Path("/tmp/tour")  # as the page says
# Of this environment, and progress that a terminal shows in one line.
NOISE = re.compile(
    r"^\[.*logging\.cc|^Prefect shows the run at |^Loading safetensors|.*starting engines: cluster"
)
KILL_AT = 2  # commits of the run that is killed
LIMIT = 240.0  # seconds for a command


class Shell:
    """A bash with job control, in the tour's folder."""

    def __init__(self, env: dict[str, str]) -> None:
        self.log = FOLDER.with_suffix(".log")
        with self.log.open("wb") as log:
            self.bash = subprocess.Popen(
                ["bash", "--norc"], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=FOLDER,
                env=env, start_new_session=True,
            )  # fmt: skip
        self.done = 0
        self("set -m")

    def __call__(self, command: str) -> str:
        """What the command prints until it ends, or is put into the background."""
        assert self.bash.stdin is not None
        before, self.done = len(self.text()), self.done + 1
        said = f"done {self.done}:"
        self.bash.stdin.write(f"{command}\necho '{said}' $?\n".encode())
        self.bash.stdin.flush()
        until = time.monotonic() + LIMIT
        while not (ended := re.search(rf"^{said} (\d+)$", self.text()[before:], re.M)):
            assert self.bash.poll() is None and time.monotonic() < until, self.text()[before:]
            time.sleep(0.1)
        assert ended[1] == "0", self.text()[before:]
        return self.text()[before : before + ended.start()]

    def text(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.bash.pid, signal.SIGKILL)


def commits() -> int:
    return len(list((FOLDER / "out/monday/_raybatch/commits").glob("*.json")))


def newest_run(page: Page, prefect: Prefect) -> None:
    """Opens the page of the flow run that began last."""
    newest = prefect.ask("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})[0]["id"]
    page.goto(f"{prefect.url.removesuffix('/api')}/runs/flow-run/{newest}")


def background(shell: Shell, command: str, page: Page, prefect: Prefect) -> str:
    """What the run printed until it is to be killed."""
    before = len(shell.text())
    with held(lambda: below(shell.bash.pid, "EngineStage"), commits):
        shell(command)
        until = time.monotonic() + LIMIT
        while commits() < KILL_AT:
            assert time.monotonic() < until, shell.text()[before:]
            time.sleep(0.05)
        newest_run(page, prefect)
        expect(page.get_by_text(re.compile("of 10,001 rows .* left")).first).to_be_visible()
        picture(page, "tour-running", PICTURES, 1000)
    return re.sub(r"^done \d+:.*\n", "", shell.text()[before:], flags=re.M)


def act(step: Step, shell: Shell, page: Page, prefect: Prefect) -> str:
    """What a step prints."""
    text = step.does.text.strip()
    if step.does.language == "yaml":
        (FOLDER / "job.yaml").write_text(step.does.text)
        return ""
    if step.does.language == "python":
        return shell(f"python - <<'END'\n{text}\nEND")
    printed = ""
    for line in text.splitlines():
        print(f"$ {line}", flush=True)
        if ELSEWHERE.match(line):
            continue
        if line.endswith("&"):
            printed += background(shell, line, page, prefect)
        elif line.startswith("kill "):
            shell(f"{line}; wait %1 || true")
        else:
            printed += shell(line)
    return printed


def shown(printed: str, step: Step) -> str:
    lines = [line.rstrip() for line in printed.splitlines() if not NOISE.match(line)]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return "".join(f"{line}\n" for line in lines[: step.lines])


def run_page(shell: Shell, page: Page, prefect: Prefect, begin: str) -> None:
    """Does what the page says from a heading on, and writes each output into it."""
    text = TOUR_PAGE.read_text(encoding="utf-8")
    first = text.index(f"## {begin}\n") if begin else 0
    for number, step in enumerate(steps(text)):
        if step.does.start < first:
            continue
        printed = act(step, shell, page, prefect)
        if step.shows is not None:
            now = TOUR_PAGE.read_text(encoding="utf-8")
            place = list(steps(now))[number].shows
            assert place is not None
            now = now[: place.start] + shown(printed, step) + now[place.end :]
            TOUR_PAGE.write_text(now, encoding="utf-8")
        pictures(step, page, prefect)


def pictures(step: Step, page: Page, prefect: Prefect) -> None:
    """Those that the page has after a step."""
    if "--html report.html" in step.does.text:
        page.goto(f"file://{FOLDER}/report.html")
        picture(page, "tour-report", PICTURES, 1100)
    if step.does.text == "raybatch run job.yaml --run-key monday\n":
        newest_run(page, prefect)
        expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
        expect(page.get_by_text(re.compile("1 in quarantine")).first).to_be_visible()
        picture(page, "tour-completed", PICTURES, 1000)


def main() -> None:
    begin = sys.argv[1] if len(sys.argv) > 1 else ""  # a heading: in the folder that is there
    if not begin and FOLDER.exists():
        sys.exit(f"{FOLDER} is there already: move it away")
    FOLDER.mkdir(exist_ok=True)
    with (
        TemporaryDirectory() as home,
        prefect_server(Path(home)) as prefect,
        browser_page() as page,
    ):
        env = {**prefect.env, "COLUMNS": "100", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        shell = Shell(env)
        try:
            run_page(shell, page, prefect, begin)
        finally:
            shell.end()


if __name__ == "__main__":
    main()
