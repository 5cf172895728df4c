"""Who is let in: the Host header, keys, browsers' origins."""

import http.client
import socket
from contextlib import suppress

import pytest

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

from serving import MODEL, serving

from shakespeare.app.server import Settings
from shakespeare.app.server.security import check_host, check_origin

ORIGIN = "https://example.org"


def test_origins_and_hosts_that_cannot_match_are_refused():
    for origin in ("*", ORIGIN, "http://localhost:3000", "http://[::1]:8080", "app://a.b", "http://a:443"):
        check_origin(origin)
    for origin in ("", *"foo http:// http://localhost:3000/ http://A.b http://a:80 https://a:443".split()):
        with pytest.raises(ValueError, match="--allow-origin is"):
            check_origin(origin)
    for host in ("*", "a.example", "A_b", "10.0.0.1", "::1", "[::1]", "FE80::1"):
        check_host(host)
    for host in ("", "a b", *"http://a.example http://a.example:80 a.example:80 [::1]:80 a/b 0:0::1".split()):
        with pytest.raises(ValueError, match="--allow-host is"):
            check_host(host)


def test_the_host_header_is_checked(client, guarded):
    admitted = "localhost LocalHost:99 Localhost.:80 127.0.0.1 127.9.9.9 127.1 [::1] [::1]:8000"
    for host in f"{admitted} [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1]".split():
        assert client.get("/health", Host=host).status == 200, host
    assert guarded.get("/health", Host="A.example.:1").status == 200
    others = "example.org a.example localhost.example.org 127.0.0.1.nip.io 127.1.example.org \xe9"
    for host in (*f"{others} 0.0.0.0 10.0.0.1 127 [::] [::2] [::ffff:10.0.0.1]".split(), ""):
        assert client.get("/health", Host=host).status == 200, host  # a probe's
        for path in ("/", "/v1/models", "/nothing", "/metrics", "/health/"):
            refused = client.get(path, Host=host)
            assert refused.status == 403 and refused.json()["error"]["code"] == "host_not_allowed", host
    for version, status in ((b"1.0", b" 200 "), (b"1.1", b" 400 ")):  # HTTP/1.0 needs no Host
        with client.connection() as connection:
            connection.sendall(b"GET /v1/models HTTP/%b\r\n\r\n" % version)
            assert status in connection.recv(12 + len(status)), version


def test_localhost_is_both_addresses(client):
    addresses = ["127.0.0.1"]
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        addresses.append("::1")  # this machine has it
    for address in addresses:
        connection = http.client.HTTPConnection(address, client.port, timeout=20)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200, address
        connection.close()


@pytest.fixture(scope="module")
def guarded(extension):
    settings = Settings((MODEL,), api_keys=("first", "second"), origins=(ORIGIN,), hosts=("a.example",))
    with serving(settings) as client:
        yield client


def test_keys_cover_all_but_health(guarded):
    assert guarded.get("/health").status == 200
    wrong = ("", "Bearer", "Bearer ", "Bearer wrong", "Bearer firs", "Bearer firstt", "Basic first", "\xff")
    for path in "/ /metrics /v1/models /openapi.json /nothing /health/ //health /v1/completions".split():
        for header in wrong:
            refused = guarded.get(path, Authorization=header)
            assert refused.status == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert guarded.get(path).status == 401
    for header in ("Bearer first", "bearer second", "Bearer  second"):
        assert guarded.get("/v1/models", Authorization=header).status == 200


def test_a_page_of_an_admitted_origin_may_call_and_of_another_may_not(client, guarded):
    response = client.get("/v1/models", Origin=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert client.send("OPTIONS", "/v1/completions", Origin=ORIGIN).status == 405
    preflight = {"Origin": ORIGIN, "Access_Control_Request_Method": "POST"}
    headers = preflight | {"Access_Control_Request_Headers": "authorization"}
    asked = guarded.send("OPTIONS", "/v1/completions", **headers)
    assert asked.status == 200 and asked.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = guarded.get("/v1/models", Authorization="Bearer first", Origin=ORIGIN)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    other = guarded.send("OPTIONS", "/v1/completions", **preflight | {"Origin": "https://other.example"})
    assert other.status == 400 and "access-control-allow-origin" not in other.headers
