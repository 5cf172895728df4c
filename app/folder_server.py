"""Show the page's files on this machine, to this machine only."""

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shakespeare.app.hosts import host_of, is_loopback


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder without a log; names the type of modules itself."""

    protocol_version = "HTTP/1.1"  # keeps connections
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".js": "text/javascript"}

    def parse_request(self) -> bool:
        """Refuse another host name, as that of another site's page after DNS rebinding."""
        if super().parse_request():
            if is_loopback(host_of(self.headers.get("Host", ""))):
                return True
            self.send_error(403, "The Host header must name this machine")
        return False

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")  # the page may have been built again
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()


def server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of a folder on 127.0.0.1; port 0 takes a free one. Raises OSError if the port is taken."""
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(folder)))
