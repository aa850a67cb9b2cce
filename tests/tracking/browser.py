"""A headless Chromium, spoken to over a pipe by the Chrome DevTools Protocol.

    with Browser(tmp_path) as browser:
        browser.open("http://127.0.0.1:5000/#/experiments/1/runs")
        browser.wait_for("val/loss")
        browser.screenshot(Path("page.png"))

https://chromedevtools.github.io/devtools-protocol: messages are JSON texts that end with a zero
byte; the browser reads them from descriptor 3 and writes to descriptor 4.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

# The texts of all elements, also of those in shadow roots and tables that scroll.
_TEXT = "document.body.innerText"


def chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with one page.

    Args:
        folder: For its profile.
        dark: Whether pages are asked for dark colours.
        size: Width and height of the page in pixels.
    """

    def __init__(
        self, folder: Path, dark: bool = False, size: tuple[int, int] = (1600, 1200)
    ) -> None:
        program = chromium()
        assert program is not None
        to_browser, self._in = os.pipe()
        self._out, from_browser = os.pipe()
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-extensions", "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}", "about:blank",
        ]  # fmt: skip

        # The numbers that the protocol wants; a pipe of ours may have one of them.
        read_fd, write_fd = (os.dup(fd) for fd in (to_browser, from_browser))
        for fd in (to_browser, from_browser):
            os.close(fd)
        script = f'exec "$@" 3<&{read_fd} 4>&{write_fd}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *command],
            pass_fds=(read_fd, write_fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        for fd in (read_fd, write_fd):
            os.close(fd)
        self._rest, self._number, self._session = b"", 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        width, height = size
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[colours])
        self._call("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, address: str) -> None:
        """Open a page; it may show its content later."""
        self._call("Page.navigate", url="about:blank")  # a change behind `#` alone loads nothing
        self._call("Page.navigate", url=address)

    def text(self) -> str:
        """Return the text that the page shows."""
        return str(self.run(_TEXT) or "")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; None if the page is between two contents."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        return answer.get("result", {}).get("value")

    def wait_for(self, *texts: str, seconds: float = 240) -> str:
        """Wait until the page shows all texts; return what it shows."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.text()
            missing = [text for text in texts if text not in shown]
            if not missing:
                return shown
            assert time.monotonic() < deadline, f"{missing} are not in:\n{shown}"
            time.sleep(0.2)

    def screenshot(self, file: Path) -> None:
        """Write a PNG of what the page shows."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._out, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer
