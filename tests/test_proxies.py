import os

import pytest

from prefect_raybatch.proxies import bypass_for_local_addresses

NAMES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://proxy:3128"}, "localhost,127.0.0.1,::1"),
        (
            {"all_proxy": "socks5://proxy", "NO_PROXY": "a.example"},
            "a.example,localhost,127.0.0.1,::1",
        ),
        ({"HTTP_PROXY": "x", "no_proxy": "localhost, 127.0.0.1,::1"}, "localhost, 127.0.0.1,::1"),
        ({"HTTPS_PROXY": "x", "NO_PROXY": "*"}, "*"),
    ],
)
def test_local_addresses_are_added_where_there_is_a_proxy(
    before: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*NAMES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    bypass_for_local_addresses()
    assert os.environ.get("no_proxy", os.environ.get("NO_PROXY")) == after
