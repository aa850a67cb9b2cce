"""Commands that start in milliseconds: forks of a process that has imported torch already.

    forkserver.run([sys.executable, "-m", "hpctrain", ...])      as subprocess.run
    forkserver.Popen([sys.executable, "-m", "hpctrain", ...])    as subprocess.Popen

    test process ── request: words, folder, environment, streams ──► server (this file as a script)
         ▲                                                             │ fork, fork
         └────────────── the process becomes its child ────────────────┴► `python -m MODULE`

The server has imported the libraries of others and nothing of ours, and it has one thread. The
process that it forks takes over the folder, environment, streams, umask and session of the request
and then does what `python -m` does. It is a child of the test process: waiting, signals and exit
codes are those of any other child.

What Python or a library reads before our code runs cannot be handed over to a fork. `Popen` starts
a new Python where such a variable differs (see `READ_AT_START`), for every other command line, and
for the options that a fork does not know. Tests of start-up, imports and installation use
`subprocess` and get a new Python always.

A command that starts ranks by itself (a sweep without a scheduler, torchrun) has a server of its
own, which is a fork, too. Its `subprocess.Popen` does what ours does, so that the ranks are forks:

    test process ─► server ─fork─► `hpctrain -m …` ─► its server ─fork─► `hpctrain run …`
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

# What a training has imported of others. mlflow is imported by the uploader only, which is another
# process. A fork with torch takes longer to start and to end, so there are two kinds of servers.
LIGHT = (
    *("numpy", "h5py", "hydra", "hydra._internal.utils", "hydra.core.plugins", "omegaconf"),
    *("submitit", "rich", "rich.table", "rich.progress", "xxhash", "sqlite3"),
)
HEAVY = (
    *LIGHT,
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
)
# Variables that Python, libc or one of these libraries reads at its start. Those of `sys.path` are
# handed over. The others that are handed over are read later, by the code that runs the ranks.
HANDED_OVER = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "TORCH_NCCL_"),
)
READ_AT_START = (
    *("PYTHON", "LC_", "LANG", "LD_", "GLIBC", "MALLOC_", "TZ", "OMP_", "OPENBLAS_", "MKL_"),
    *("GOMP_", "KMP_", "TORCH", "PYTORCH", "CUDA", "HDF5", "H5PY", "NPY_", "NUMPY"),
)
# Python's hash seed differs between processes, and what depends on it should be seen by a test:
# the commands alternate between the servers of a kind.
SERVERS = 2
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEAD = struct.Struct("!q")


_PYTHON = sys.executable  # of the servers; a test may replace that of its own process
_start_new_python = subprocess.Popen._execute_child


class Popen(subprocess.Popen):
    """A `subprocess.Popen` that forks the server for `python -m MODULE` where that is the same."""

    forked = False  # whether the server was used

    def _execute_child(self, *given: Any) -> None:
        # The names of the parameters; their order is Python's own affair.
        names = list(inspect.signature(_start_new_python).parameters)[1:]
        call = dict(zip(names, given, strict=True))
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in (call["env"] or os.environ).items()}
        if not _is_alike(call, env):
            _start_new_python(self, *given)
            return
        pipes = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        options, words = _split(call["args"])
        ranks = _starts_ranks(words, env)
        request = {
            "options": options,
            "words": words,
            "ranks": ranks,
            "env": env,
            "cwd": os.fsdecode(call["cwd"] or os.getcwd()),
            "umask": _umask() if call["umask"] == -1 else call["umask"],
            "session": call["start_new_session"],
            "group": call["process_group"],
            "parent": os.getpid(),
            # A signal that the parent ignores is ignored by a new process, too.
            "ignored": [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN],
        }
        streams = [usual if pipe == -1 else pipe for usual, pipe in enumerate(pipes)]
        with _lock:
            heavy = ranks or _trains(words, request["cwd"])
            self.pid = _next_server(heavy).start(request, streams)
        self._child_created = self.forked = True
        self._close_pipe_fds(
            *(call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(call[name] for name in ("errread", "errwrite")),
        )


def run(
    args: Any,
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, with our `Popen`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, args, stdout, stderr)
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def _is_alike(call: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """Whether a fork of the server does the same as a new Python."""
    command = call["args"]
    if isinstance(command, str | bytes) or sys.platform != "linux":
        return False
    return (
        os.fsdecode(command[0]) == _PYTHON
        and bool(_split(command)[1])
        and not any(call[name] for name in ("preexec_fn", "pass_fds", "shell"))
        and call["executable"] in (None, command[0])
        and {call[name] for name in ("gid", "gids", "uid")} <= {None, -1}
        and os.path.isdir(call["cwd"] or ".")
        and _at_start(env) == _at_start(_ENVIRONMENT)
        and not any(map(_replaces_preloaded, _python_path(env, call["cwd"] or ".")))
    )


def _split(command: Any) -> tuple[list[str], list[str]]:
    """The options and the words after `-m` of `python [-u] [-P] -m MODULE …`; no words if not."""
    words = [os.fsdecode(word) for word in command[1:]]
    count = next((i for i, word in enumerate(words) if word not in ("-u", "-P")), 0)
    return words[:count], words[count + 1 :] if words[count : count + 1] == ["-m"] else []


def _python_path(env: Mapping[str, str], cwd: Any) -> list[str]:
    """The folders of PYTHONPATH, as Python puts them into `sys.path`."""
    folders = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    return [os.path.abspath(os.path.join(os.fsdecode(cwd), folder)) for folder in folders]


def _replaces_preloaded(folder: str) -> bool:
    """Whether a folder of PYTHONPATH has what the servers have imported from elsewhere."""
    if not os.path.isdir(folder):
        return False
    ours = {name.partition(".")[0] for name in os.listdir(folder)}
    preloaded = {name.partition(".")[0] for name in HEAVY}
    return bool(ours & (preloaded | {"sitecustomize", "usercustomize"}))


def _starts_ranks(words: list[str], env: Mapping[str, str]) -> bool:
    """Whether a command starts trainings by itself. A wrong answer costs time only."""
    module, *rest = words
    return module in ("torch.distributed.run", "submitit.local._local") or (
        module == "hpctrain"
        and ("-m" in rest or rest[:1] == ["resume"])
        and "launch.dry_run=true" not in rest
        and shutil.which("sbatch", path=env.get("PATH")) is None
    )


def _trains(words: list[str], cwd: str) -> bool:
    """Whether a command imports torch. A wrong answer costs time only."""
    module, *rest = words
    program = os.path.join(cwd, f"{module}.py")  # which a test has written
    if os.path.exists(program):
        with open(program) as text:
            return "\nimport torch\n" in text.read()
    values = [word for word in rest if "=" in word]
    return (
        module.startswith("torch.")
        or module == "tests.ranks"
        or (
            module == "hpctrain"
            and "-m" not in rest
            and (rest[:1] == ["run"] or rest[:1] == ["resume"] or rest[:1] == values[:1] != [])
        )
    )


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_AT_START) and not name.startswith(HANDED_OVER)
    }


def _umask() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


class Server:
    """A process that imports some libraries once, and is forked for each command."""

    def __init__(self, *preloaded: str) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [_PYTHON, __file__, str(theirs.fileno()), *preloaded],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, request: Mapping[str, Any], streams: list[int]) -> int:
        """Fork a process that does what `request` says; return its process id.

        Raises:
            RuntimeError: The server has ended.
        """
        content = pickle.dumps(request)
        libc = ctypes.CDLL(None, use_errno=True)
        # A process whose parent ends becomes the child of the next ancestor that asked for such
        # children. We ask for the time that this one needs: others belong to init.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.control, [HEAD.pack(len(content))], streams)
            self.control.sendall(content)
            answer = _receive(self.control, HEAD.size)
        except BaseException as error:
            self.close()  # the next request would be given the answer of this one
            if isinstance(error, EOFError | OSError):
                raise RuntimeError("the fork server of the tests has ended") from error
            raise
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        pid: int = HEAD.unpack(answer)[0]
        if pid <= 0:
            raise RuntimeError("the fork server of the tests could not start a process")
        return pid

    def close(self) -> None:
        """End the server. What it has started goes on: it is ours."""
        self.control.close()
        self.process.wait()


class _Inner(Server):
    """The server of a command that starts ranks: a fork of it, made before the command runs."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.control, self.pid = control, pid

    def close(self) -> None:
        self.control.close()
        os.waitpid(self.pid, 0)


_ENVIRONMENT = dict(os.environ)
_servers: dict[bool, list[Server]] = {False: [], True: []}
_commands = {False: 0, True: 0}  # how many each kind of servers was asked for
_inner: Server | None = None
_lock = threading.RLock()


def begin() -> None:
    """Take the environment of now as that of the servers: conftest.py has prepared it."""
    _ENVIRONMENT.clear()
    _ENVIRONMENT.update(os.environ)


def restore_start_variables() -> None:
    """Give the variables that are read at start the values that they had at `begin`."""
    for name in _at_start(os.environ).keys() | _at_start(_ENVIRONMENT).keys():
        if name in _ENVIRONMENT:
            os.environ[name] = _ENVIRONMENT[name]
        else:
            del os.environ[name]


def _next_server(heavy: bool) -> Server:
    if _inner is not None:
        return _inner
    servers = _servers[heavy]
    servers[:] = [server for server in servers if server.control.fileno() != -1]
    _commands[heavy] += 1
    # A server with torch takes 3 s of CPU time to start: twenty commands are worth a second one.
    if len(servers) < (1 if heavy and _commands[heavy] < 20 else SERVERS):
        servers.insert(0, Server(*(HEAVY if heavy else LIGHT)))
    servers.append(servers.pop(0))
    return servers[-1]


@atexit.register
def close() -> None:
    """End the servers of this process."""
    for servers in _servers.values():
        while servers:
            servers.pop().close()


def _receive(stream: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not (part := stream.recv(count - len(parts))):
            raise EOFError
        parts += part
    return bytes(parts)


# What follows runs in the server.


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Return the request in the fork; the server exits."""
    # Ctrl-C goes to the whole group; the server ends with the test process, when this socket does.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork keeps none of the other threads"
    while True:
        head, streams, _, _ = socket.recv_fds(control, HEAD.size, 3)
        if not head:
            os._exit(0)
        head += _receive(control, HEAD.size - len(head))
        request: dict[str, Any] = pickle.loads(_receive(control, HEAD.unpack(head)[0]))
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            # The process between ends at once, so that the test process becomes the parent.
            between = os.getpid()
            if os.fork():
                os._exit(0)
            try:
                _become(request, streams, between, writing)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(70)
            return request
        os.close(writing)
        os.waitpid(between, 0)
        answer = os.read(reading, HEAD.size)
        for number in (reading, *streams):
            os.close(number)
        control.sendall(answer or HEAD.pack(0))


def _become(request: Mapping[str, Any], streams: list[int], between: int, ready: int) -> None:
    """Take over what the request says, and tell the server that it is done."""
    while (parent := os.getppid()) == between:
        time.sleep(0.0002)
    if parent != request["parent"]:
        os._exit(0)  # the test process is gone
    for number in SIGNALS:
        if number not in request["ignored"]:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    if request["session"]:
        os.setsid()
    if request["group"] != -1:
        os.setpgid(0, request["group"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.write(ready, HEAD.pack(os.getpid()))
    os.closerange(3, 1000)


def _begin_inner() -> dict[str, Any] | None:
    """Fork a server for this process. Return None here, and the request in a fork of the server."""
    global _inner
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _inner = _Inner(ours, pid)
        # Not the name of the class, which modules of others have imported already.
        subprocess.Popen._execute_child = Popen._execute_child
        return None
    ours.close()
    # Whoever reads what the command writes waits for the command, and not for its server.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    request = serve(theirs)
    theirs.detach()
    return request


def _set_path(request: Mapping[str, Any], rest: list[str]) -> None:
    """Make `sys.path` what it is in a new Python; `rest` is what all processes have of it."""
    safe = "-P" in request["options"] or request["env"].get("PYTHONSAFEPATH")
    first = [] if safe else [os.getcwd()]
    folders = _python_path(request["env"], os.getcwd())
    sys.path[:] = first + list(dict.fromkeys(folders + rest))


def _renew_stream(number: int, name: str, at_once: bool) -> None:
    """Replace `sys.stdin`, `sys.stdout` or `sys.stderr` by one for the file that is there now."""
    old = getattr(sys, name)
    at_once = at_once or old.write_through  # PYTHONUNBUFFERED
    mode = "rb" if number == 0 else "wb"
    stream = io.TextIOWrapper(
        os.fdopen(number, mode, 0 if at_once and number else -1, closefd=False),
        old.encoding,
        old.errors,
        newline=None if number == 0 else "\n",
        line_buffering=old.line_buffering or (not at_once and os.isatty(number)),
        write_through=at_once,
    )
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Be the server, and in its forks `python -m MODULE`."""
    here = sys.path[0]
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages
    gc.enable()
    assert sys.path[0] == here
    given = _python_path(_ENVIRONMENT, os.getcwd())
    rest = [folder for folder in sys.path[1:] if folder not in given]
    request: dict[str, Any] | None = serve(control)
    control.detach()
    while request is not None:
        work = request
        request = _begin_inner() if work["ranks"] else None
    words = work["words"]
    sys.argv = ["-m", *words[1:]]
    sys.orig_argv = [_PYTHON, *work["options"], "-m", *words]
    _set_path(work, rest)
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()  # from the system, as in a new process
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _renew_stream(number, name, "-u" in work["options"])
    sys.modules["__main__"] = type(sys)("__main__")
    if "torch" in sys.modules:
        _run_without_teardown(words[0])
    else:
        runpy._run_module_as_main(words[0])


def _run_without_teardown(module: str) -> None:
    """Run a module, and end as Python does up to where it deletes all that it has imported.

    That takes 0.3 s of CPU time with torch, because a fork has to copy each page that it changes.
    """
    code: Any = 0
    try:
        runpy._run_module_as_main(module)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        raise  # Python ends itself by this signal
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.excepthook(*sys.exc_info())
        code = 120  # as Python says it
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
