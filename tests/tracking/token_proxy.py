"""A reverse proxy that lets only requests with a token through, as a company puts before MLflow."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOKEN = "a-token-of-thirty-two-characters"
_PASSED = ("Content-Type", "Content-Length", "Accept")


class TokenProxy(ThreadingHTTPServer):
    """The proxy, which serves in a thread while the context lasts.

    Args:
        target: The port of the server behind it on this machine.
        status: The answer to a request without the token.
    """

    daemon_threads = True

    def __init__(self, target: int, status: int = 401) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.status = target, status
        self.refused = 0
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
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.server.refused += 1
            self._answer(self.server.status, "text/html", b"<h1>Not this way</h1>")
            return
        passed = {name: self.headers[name] for name in _PASSED if name in self.headers}
        behind = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        try:
            behind.request(self.command, self.path, body, passed)
            answer = behind.getresponse()
            kind = answer.getheader("Content-Type", "application/json")
            self._answer(answer.status, kind, answer.read())
        except OSError:
            self._answer(502, "text/html", b"<h1>502 Bad Gateway</h1>")
        finally:
            behind.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *said: Any) -> None:
        pass
