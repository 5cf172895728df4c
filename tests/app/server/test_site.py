"""The page of web/ on a server."""

from dataclasses import replace

import pytest
from serving import MODEL, serving

from shakespeare.app.server import Settings
from shakespeare.app.server.security import checked_root


@pytest.fixture(scope="module")
def paged(tmp_path_factory, extension):
    """A server with what stands for a page."""
    made = tmp_path_factory.mktemp("page")
    (made / "js").mkdir()
    (made / "index.html").write_text("<head>\n<title>A page</title>\n</head>")
    (made / "js" / "main.js").write_text("// code")
    (made.parent / "secret").write_text("not the page's")
    with serving(Settings((MODEL,), page=made)) as client:
        yield client


def test_the_page_knows_its_server_the_files_have_their_types_and_the_api_its_paths(paged):
    page = paged.get("/")
    assert page.status == 200 and b"A page" in page.data
    assert b'<meta name="server" content="v1">' in page.data
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    code = paged.get("/js/main.js")
    assert (code.data, code.headers["content-type"]) == (b"// code", "text/javascript")
    assert code.headers["x-content-type-options"] == "nosniff"
    assert paged.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert paged.complete(max_tokens=3, seed=1).status == 200
    assert paged.get("/v1/completions").status == 405 and paged.send("POST", "/js/main.js").status == 404


def test_a_proxy_may_have_it_at_a_path_and_leave_the_path_in_requests(paged, monkeypatch):
    application = paged.server.application
    monkeypatch.setattr(application, "settings", replace(application.settings, root_path="/a/b"))
    for path in ("/", "/js/main.js", "/v1/models", "/health"):
        assert paged.get(f"/a/b{path}").data == paged.get(path).data != b"", path
    bare = paged.get("/a/b")
    assert bare.status == 307 and bare.headers["location"] == "/a/b/"
    assert paged.get("/openapi.json").json()["servers"] == [{"url": "/a/b"}]
    assert [checked_root(path) for path in ("", "/", "/a/b/")] == ["", "", "/a/b"]
    for path in ("a", "//a", "/a?b", "https://a.example/b"):
        with pytest.raises(ValueError, match="--root-path is"):
            checked_root(path)


@pytest.mark.parametrize("path", ["/nothing.js", "/../secret", "/%2e%2e/secret", "/js/../../secret", "/js"])
def test_other_paths_are_404_in_openais_shape(paged, path):
    response = paged.get(path)
    assert response.status == 404 and "error" in response.json() and b"not the page's" not in response.data
