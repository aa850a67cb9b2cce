"""A reverse proxy that lets only requests with a token through, as a company puts before MLflow."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOKEN = "a-token-of-thirty-two-characters"


class TokenProxy(ThreadingHTTPServer):
    """The proxy, which serves in a thread while the context lasts; the server behind it is down.

    Args:
        status: The answer to a request without the token.
    """

    daemon_threads = True

    def __init__(self, status: int = 401) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.uri = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: TokenProxy

    def do_GET(self) -> None:
        knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.send_response(502 if knows else self.server.status)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<h1>Not this way</h1>")

    def log_message(self, *said: Any) -> None:
        pass
