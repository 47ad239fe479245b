"""The access to the server: hosts, origins, and the routes that browsers and proxies ask for."""

from __future__ import annotations

import pytest

from tests.helpers.serving import COMPLETE, Serve, call

pytestmark = [
    pytest.mark.extra("serve"),
    pytest.mark.since("m5_overlap"),
    pytest.mark.one_mode,
]

PAGE = "https://chat.example"


@pytest.mark.parametrize("path", ["/metrics", "/live", "/v1/models", "/health", "/"])
def test_a_page_that_rebinds_its_name_is_refused(path: str, serve: Serve) -> None:
    """The name of the page points to 127.0.0.1, and the browser sends it as `Host`."""
    run = serve(allowed_hosts="gpu7, *.lab.example")
    port = run.port
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "lab.example",
                 "127.0.0.1.evil.example", "[evil]:80", "xgpu7"):  # fmt: skip
        status, answer = run.get(path, {"Host": host})
        assert status == 421 and "--allowed-hosts" in answer["error"]["message"], host
    if path != "/live":  # it would go on for ever
        for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"192.168.3.4:{port}", "[::1]",
                     f"[::1]:{port}", "gpu7", f"a.lab.example:{port}"):  # fmt: skip
            assert run.get(path, {"Host": host})[0] == 200, host


def test_the_given_host_is_a_known_name(serve: Serve) -> None:
    run = serve(host="localhost")
    assert run.get("/health", {"Host": "localhost"})[0] == 200


def test_pages_of_other_sites_are_refused(serve: Serve) -> None:
    run = serve()
    own = f"http://127.0.0.1:{run.port}"
    for origin in (PAGE, "null", f"http://127.0.0.1:{run.port + 1}", "http://127.0.0.1"):
        for path in ("/metrics", "/live", "/v1/models"):
            status, answer = run.get(path, {"Origin": origin})
            assert status == 403 and answer["error"]["code"] == "foreign_origin"
        assert run.post(COMPLETE, call(), {"Origin": origin})[0] == 403
    assert run.post(COMPLETE, call(max_tokens=1), {"Origin": own})[0] == 200
    status, _, headers = run.call("OPTIONS", COMPLETE, None, {"Origin": own})
    assert status == 405 and "access-control-allow-origin" not in headers


def test_a_page_of_an_allowed_site(serve: Serve) -> None:
    """A browser asks first, without the key, and then sends the call with it."""
    run = serve(allowed_origins=f"{PAGE}, http://localhost:3000", api_key="secret")
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization, content-type"}  # fmt: skip
    status, _, headers = run.call("OPTIONS", COMPLETE, None, asked)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    given = {"Origin": PAGE, "Authorization": "Bearer secret"}
    status, _, headers = run.post(COMPLETE, call(max_tokens=1), given)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    assert run.post(COMPLETE, call(), {"Origin": PAGE})[0] == 401
    status, _, headers = run.call("OPTIONS", COMPLETE, None, {**asked, "Origin": "https://x"})
    assert status == 403 and "access-control-allow-origin" not in headers


def test_head_is_where_get_is(serve: Serve) -> None:
    run = serve()
    for path in ("/health", "/v1/models", "/metrics"):
        status, text, headers = run.call("HEAD", path, None, {})
        assert status == 200 and text in ("", None) and int(headers["content-length"]) > 0


def test_an_api_that_is_not_there_names_the_other(serve: Serve) -> None:
    status, answer, _ = serve().post("/v1/responses", {"input": "x"})
    assert status == 404 and "/v1/chat/completions" in answer["error"]["message"]


def test_the_prefix_cache_can_be_emptied_if_the_server_says_so(serve: Serve) -> None:
    assert serve().post("/reset_prefix_cache", {})[0] == 404


def test_the_prefix_cache_is_emptied(serve: Serve) -> None:
    run = serve(prefix_cache_route=True)
    run.post(COMPLETE, call(prompt="a" * 100, max_tokens=1))
    status, answer, _ = run.post("/reset_prefix_cache", {})
    assert status == 200 and answer["pages"] > 0
    assert run.in_engine(lambda engine: engine.stats()).kv_pages_cached == 0
