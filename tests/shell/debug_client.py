"""A client of debugpy on the node where a rank waits: `python debug_client.py PORT EXPRESSION`.

It attaches as an editor does, and prints the place where the rank stops and the expression there.
"""

import json
import socket
import sys
from typing import Any


class _Editor:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._answers = self._socket.makefile("rb")
        self._sent = 0

    def send(self, command: str, **arguments: Any) -> int:
        self._sent += 1
        said = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(said).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._sent

    def _read(self) -> dict[str, Any]:
        size = 0
        while line := self._answers.readline().strip():
            size = int(line.partition(b":")[2])
        message: dict[str, Any] = json.loads(self._answers.read(size))
        return message

    def event(self, name: str) -> dict[str, Any]:
        while (message := self._read()).get("event") != name:
            pass
        body: dict[str, Any] = message.get("body", {})
        return body

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        number = self.send(command, **arguments)
        while (message := self._read()).get("request_seq") != number:
            pass
        assert message["success"], message
        body: dict[str, Any] = message.get("body", {})
        return body


def main(port: str, expression: str) -> None:
    editor = _Editor(int(port))
    editor.ask("initialize", adapterID="test", clientID="test")
    editor.send("attach", justMyCode=False)
    editor.event("initialized")
    editor.ask("setExceptionBreakpoints", filters=["uncaught"])
    editor.ask("configurationDone")
    thread = editor.event("stopped")["threadId"]
    frame = editor.ask("stackTrace", threadId=thread, levels=1)["stackFrames"][0]
    value = editor.ask("evaluate", expression=expression, frameId=frame["id"], context="repl")
    print(frame["name"], value["result"])
    editor.ask("disconnect", terminateDebuggee=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
