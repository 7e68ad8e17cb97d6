"""What `make test` installs, on a machine whose PATH has none of it."""

import os
from pathlib import Path

import programs
import pytest

ALL = {name for program in programs.PROGRAMS.values() for name in program.names}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH; this process is root, and no variable leaves anything out."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def program(folder: Path, name: str, text: str = "") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def apt(folder: Path, installs: set[str]) -> None:
    """An apt-get that logs its arguments and puts `installs` on PATH."""
    lines = [f'echo "$*" >> {folder}/log']
    lines += ['[ "$1" = install ] || exit 0']
    for name in sorted(installs):
        lines += [f'echo "#!/bin/sh" > {folder}/{name}', f"/bin/chmod 755 {folder}/{name}"]
    program(folder, "apt-get", "\n".join(lines))


def test_everything_there_runs_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ALL:
        program(path, name)
    assert programs.install() == 0
    assert capsys.readouterr().out == ""


def test_root_installs_what_is_missing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apt(path, ALL)
    program(path, "google-chrome")  # one browser is enough
    assert programs.install() == 0
    assert (path / "log").read_text().splitlines() == [
        "update -q",
        "install -y -q --no-install-recommends radosgw ceph-mon ceph-osd util-linux npm",
    ]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "radosgw" in said[0] and "Chromium" not in said[0]


def test_a_missing_library_is_a_reason_to_install(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALL:
        program(path, name)
    apt(path, set())
    monkeypatch.setattr(programs.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert programs.install() == 1  # the library is still missing afterwards
    assert "install -y -q --no-install-recommends chromium libatomic1" in (path / "log").read_text()


def test_an_older_version_of_npm_is_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in ALL - {"azurite-blob"}:
        program(path, name)
    package = tmp_path_factory.mktemp("lib") / "node_modules/azurite"
    package.mkdir(parents=True)
    program(package, "main.js")
    (path / "azurite-blob").symlink_to(package / "main.js")
    apt(path, set())
    manifest = package / "package.json"
    manifest.write_text('{"version": "3.9.0"}')
    program(path, "npm", f'echo "$*" >> {path}/log')
    assert programs.install() == 1  # it stays old
    manifest.write_text('{"version": "3.5.0"}')
    program(path, "npm", f"""echo '{{"version": "4.0.0"}}' > {manifest}""")
    assert programs.install() == 0
    with pytest.raises(pytest.fail.Exception, match=r"too old\. Run: python tests/programs\.py"):
        manifest.write_text('{"version": "3.36.0"}')
        programs.require("azurite")


def test_sudo_without_a_password_installs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    apt(path, ALL)
    program(path, "sudo", f'echo "sudo $*" >> {path}/log; shift; [ "$1" = true ] || exec "$@"')
    assert programs.install(["ceph"]) == 0
    log = (path / "log").read_text()
    assert log.count("sudo -n /usr/bin/env DEBIAN_FRONTEND=noninteractive apt-get") == 2


@pytest.mark.parametrize("sudo", ["no sudo", "sudo asks for a password"])
def test_without_the_right_the_command_is_told(
    sudo: str, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    apt(path, ALL)
    if sudo != "no sudo":
        program(path, "sudo", "exit 1")
    assert programs.install() == 1
    assert not (path / "log").exists()
    said = capsys.readouterr().out
    assert "Run: sudo npm install --global --no-audit --no-fund azurite@" in said
    assert "sudo apt-get install -y -q --no-install-recommends chromium libatomic1 radosgw" in said
    assert "make test-all WITHOUT=browser,ceph,azurite" in said
    assert programs.install(tier="test") == 1
    said = capsys.readouterr().out
    assert "make test WITHOUT=ceph" in said and "chromium" not in said


def test_other_systems_are_told_the_programs(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert programs.install(["ceph"]) == 1
    assert "chromium, chromium-browser, google-chrome" in capsys.readouterr().out


def test_an_installation_that_fails_or_brings_nothing(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(path, "apt-get", '[ "$1" = update ] || { echo no such package; exit 100; }')
    assert programs.install() == 1
    assert "no such package" in capsys.readouterr().out
    apt(path, set())
    assert programs.install() == 1
    assert "Still missing after the installation: browser, ceph, azurite" in capsys.readouterr().out


@pytest.mark.parametrize(("without", "said"), [("browser", "CI=true"), ("chrome", "not known")])
def test_ci_leaves_nothing_out_and_names_are_checked(
    without: str,
    said: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr("sys.argv", ["programs.py", "--without", without])
    try:
        ended = programs.main()
    except SystemExit as end:
        ended, said_at_end = 1, str(end)
    else:
        said_at_end = capsys.readouterr().out
    assert ended == 1 and said in said_at_end


def test_tests_that_are_left_out_are_skipped_and_others_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(programs.WITHOUT, "browser")
    with pytest.raises(pytest.skip.Exception, match="WITHOUT=browser"):
        programs.require("browser")
    with pytest.raises(pytest.fail.Exception, match=r"python tests/programs\.py"):
        programs.require("ceph")


def test_tests_with_a_browser_are_only_in_the_tier_that_installs_one() -> None:
    tests = Path(__file__).parent
    with_browser = [p for p in tests.rglob("test_*.py") if "browser_page()" in p.read_text()]
    with_browser.remove(Path(__file__))
    assert len(with_browser) >= 2 and "browser" not in programs.TIERS["test"]
    for path in with_browser:
        assert "pytestmark = [pytest.mark.e2e, pytest.mark.whole" in path.read_text(), path
