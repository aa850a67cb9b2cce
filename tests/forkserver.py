"""Commands that start in milliseconds: forks of a process that has imported torch already.

    forkserver.run([sys.executable, "-m", "hpctrain", ...])      like subprocess.run
    forkserver.Popen([sys.executable, "-m", "hpctrain", ...])    like subprocess.Popen

    test process ── request: words, folder, environment, streams ──► server (this file as a script)
         ▲                                                             │ fork, fork
         └────────────── the process becomes its child ────────────────┴► `python -m MODULE`

The server has one thread. It has imported libraries, and the modules of hpctrain that most of its
commands import, and it composes their configs (quick_compose.py). A fork whose `sys.path` leads to
another hpctrain, such as a copy of the code, drops these and imports that one. The process that it
forks takes over the folder, environment, streams, umask and session of the request and then does
what `python -m` does. It is a child of the test process: waiting, signals and exit codes are those
of any other child.

A fork cannot take over what Python or a library reads before our code runs. `Popen` therefore
starts a new Python where such a variable differs (see `READ_AT_START`), for every other command
line, and for the options that a fork does not support. Tests of start-up, imports and installation
use `subprocess`, so that they always get a new Python.

A command that starts ranks itself (a sweep without a scheduler, torchrun), and a training, whose
observer and monitor are processes, have a server of their own, which is a fork too. In such a
command `subprocess.Popen` works like our `Popen`, so that what it starts are forks:

    test process ─► server ─fork─► `hpctrain -m …` ─► its server ─fork─► `hpctrain run …`
"""

import atexit
import ctypes
import gc
import importlib
import importlib.machinery
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
import sysconfig
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

# The libraries of others that a training imports. mlflow is missing, because only the uploader
# imports it, in another process. A fork with torch takes longer to start and to end, so there are
# several kinds of servers.
LIGHT = (
    *("numpy", "h5py", "hydra", "hydra._internal.utils", "hydra.core.plugins", "omegaconf"),
    *("submitit", "rich", "rich.table", "rich.progress", "xxhash", "sqlite3"),
)
HEAVY = (
    *LIGHT,
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.distributed.pipelining", "fsspec", "pytest"),
)
UPLOADING = (*LIGHT, "mlflow", "mlflow.store.tracking.sqlalchemy_store")
# Ours, which would take each fork 0.3 s. hpctrain.engine.job.fit is missing, because it notes
# what was imported before it.
OURS = {
    LIGHT: (
        *("hpctrain.cli", "hpctrain.launch.sweeps.sweep", "data_prep.cli"),
        "hpctrain.config.composing.compose_sweep",
    ),
    HEAVY: (
        *("hpctrain.cli", "hpctrain.engine.job.here", "hpctrain.config.composing.compose"),
        *("hpctrain.launch.sweeps.sweep", "hpctrain.config.composing.compose_sweep"),
        *(
            "hpctrain.engine.job.attempt",
            "hpctrain.engine.loop",
            "hpctrain.insight.preflight",
            "hpctrain.addons.looking.first_look",
        ),
        *("hpctrain.engine.loop", "hpctrain.insight.monitor.process", "hpctrain.tasks"),
        *("hpctrain.models", "hpctrain.results.summary", "hpctrain.tracking.links"),
        *("hpctrain.engine.supervised.deterministic", "numpy.ma"),
        # What a training starts beside itself.
        *("hpctrain.engine.faults.observer", "hpctrain.insight.monitor.process"),
    ),
    UPLOADING: ("hpctrain.tracking.uploading.upload",),
}
# READ_AT_START are the variables that Python, libc or one of these libraries reads at its start.
# HANDED_OVER are the exceptions, which a fork can take over: `sys.path` is made from the first two,
# and the others are read later, by the code that runs the ranks. The last ones are those that a
# training sets: what it starts beside itself compiles nothing.
HANDED_OVER = (
    *("PYTHONPATH", "PYTHONSAFEPATH", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "TORCH_NCCL_"),
    *("TORCH_FR_", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"),
)
READ_AT_START = (
    *("PYTHON", "LC_", "LANG", "LD_", "GLIBC", "MALLOC_", "TZ", "OMP_", "OPENBLAS_", "MKL_"),
    *("GOMP_", "KMP_", "TORCH", "PYTORCH", "CUDA", "HDF5", "H5PY", "NPY_", "NUMPY"),
)
# Commands of hpctrain that import torch, as a training does.
TRAINING = ("run", "resume", "evaluate", "predict", "export", "plan")
# With these, importing mlflow starts no thread.
ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "MLFLOW_DISABLE_TELEMETRY": "true"}
# Modules that use MLflow, or start another one that does.
UPLOADERS = (
    *("hpctrain.tracking.uploading.uploader", "tests.tracking.sync_runs"),
    *("tests.tracking.make_store", "tests.tracking.fake_training"),
)
# Python's hash seed differs between processes, and a test should notice code that depends on it.
# Therefore the commands alternate between the servers of a kind.
SERVERS = 2
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEAD = struct.Struct("!q")


_INSTALLED = {*sysconfig.get_paths().values()}  # where the servers import from themselves
_PYTHON = sys.executable  # the Python of the servers; a test may replace that of its own process
_start_new_python = subprocess.Popen._execute_child


class Popen(subprocess.Popen):
    """A `subprocess.Popen` that forks the server where a fork does the same as a new Python."""

    forked = False  # whether the process is a fork of a server
    lasting = False  # whether it is for several tests

    def _execute_child(self, *given: Any) -> None:
        # Python may change the order of these private parameters, so they are matched by name.
        names = list(inspect.signature(_start_new_python).parameters)[1:]
        call = dict(zip(names, given, strict=True))
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in (call["env"] or os.environ).items()}
        options, words = _split(call["args"])
        if not (_is_alike(call, env) and _inner_has(words)):
            _start_new_python(self, *given)
            return
        pipes = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        cwd = os.fsdecode(call["cwd"] or os.getcwd())
        heavy = _starts_ranks(words, env) or _trains(words, cwd)
        request = {
            "options": options,
            "words": words,
            "starts": heavy,
            "env": env,
            "cwd": cwd,
            "umask": _umask() if call["umask"] == -1 else call["umask"],
            "session": call["start_new_session"],
            "group": call["process_group"],
            "parent": os.getpid(),
            # A signal that the parent ignores is ignored by a new process, too.
            "ignored": [n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN],
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        }
        streams = [usual if pipe == -1 else pipe for usual, pipe in enumerate(pipes)]
        with _lock:
            libraries = HEAVY if heavy else LIGHT
            libraries = UPLOADING if words[0] in UPLOADERS else libraries
            self.pid = _next_server(libraries).start(request, streams)
        self._child_created = self.forked = True
        _forks.add(self)
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
    """Do what `subprocess.run` does, but with our `Popen`."""
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


def end_what_is_left() -> None:
    """Kill the forks that a failed test has left with all that they have started.

    A training would go on for ever. And the object of a process that runs, with the traceback that
    holds it, is garbage whose warning would fail some later test.
    """
    for process in [process for process in _forks if not process.lasting]:
        if process.poll() is None:
            leader = os.getpgid(process.pid) == process.pid
            (os.killpg if leader else os.kill)(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _is_alike(call: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """Return whether a fork of the server does the same as a new Python."""
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


def _inner_has(words: list[str]) -> bool:
    """Return whether the server of this command, if it has one, has imported what these need."""
    return _inner is None or words[0] not in UPLOADERS or _inner.uploads


def _split(command: Any) -> tuple[list[str], list[str]]:
    """Split `python [-u] [-P] -m MODULE …` into its options and the words after `-m`.

    For any other command there are no words.
    """
    words = [os.fsdecode(word) for word in command[1:]]
    count = next((i for i, word in enumerate(words) if word not in ("-u", "-P")), 0)
    return words[:count], words[count + 1 :] if words[count : count + 1] == ["-m"] else []


def _python_path(env: Mapping[str, str], cwd: Any) -> list[str]:
    """Return the folders of PYTHONPATH as Python puts them into `sys.path`."""
    folders = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    return [os.path.abspath(os.path.join(os.fsdecode(cwd), folder)) for folder in folders]


def _replaces_preloaded(folder: str) -> bool:
    """Return whether a folder has a module that the servers have imported from elsewhere."""
    if not os.path.isdir(folder) or folder in _INSTALLED:
        return False
    ours = {name.partition(".")[0] for name in os.listdir(folder)}
    preloaded = {name.partition(".")[0] for name in (*HEAVY, *UPLOADING)}
    return bool(ours & (preloaded | {"sitecustomize", "usercustomize"}))


def _starts_ranks(words: list[str], env: Mapping[str, str]) -> bool:
    """Return whether a command starts trainings, or an uploader, as our forks.

    A wrong answer only costs time.
    """
    module, *rest = words
    starting = ("torch.distributed.run", "submitit.local._local", "tests.tracking.fake_training")
    return module in starting or (
        module == "hpctrain"
        and ("-m" in rest or rest[:1] == ["resume"])
        and (
            # A submission looks at the classes of a user in a process that imports them.
            any("_target_=" in word or word.startswith("loop=") for word in rest)
            or (
                "launch.dry_run=true" not in rest
                and shutil.which("sbatch", path=env.get("PATH")) is None
            )
        )
    )


def _trains(words: list[str], cwd: str) -> bool:
    """Return whether a command imports torch. A wrong answer only costs time."""
    module, *rest = words
    program = os.path.join(cwd, f"{module}.py")  # a program that a test has written
    if os.path.exists(program):
        with open(program) as file:
            text = f"\n{file.read()}"
        return "\nimport torch\n" in text or "hpctrain.session(" in text
    values = [word for word in rest if "=" in word]
    return (
        module.startswith("torch.")
        or module
        in (
            *("tests.ranks", "tests.gpu.bench_gpt2", "hpctrain.engine.checkpoint.saving.writer"),
            "hpctrain.insight.foreign_targets",
        )
        or (
            module == "hpctrain"
            and rest != []
            and "-m" not in rest
            and "--help" not in rest
            and (rest[0] in TRAINING or rest[:1] == values[:1] != [])
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
    """A process that imports some libraries once and is forked for each command."""

    def __init__(self, *preloaded: str) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [_PYTHON, __file__, str(theirs.fileno()), *preloaded],
                env=_ENVIRONMENT | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, request: Mapping[str, Any], streams: list[int]) -> int:
        """Fork a process that does what `request` says, and return its process id.

        Args:
            request: The words, folder, environment and other properties of the process.
            streams: The file descriptors of its stdin, stdout and stderr.

        Raises:
            RuntimeError: The server has ended.
        """
        content = pickle.dumps(request)
        libc = ctypes.CDLL(None, use_errno=True)
        # A process whose parent ends becomes the child of the next ancestor that is a subreaper.
        # We are one only while the fork needs it: all other orphans belong to init.
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.control, [HEAD.pack(len(content))], streams)
            self.control.sendall(content)
            answer = _receive(self.control, HEAD.size)
        except BaseException as error:
            self.close()  # otherwise the next request would get the answer to this one
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
        """End the server. Its forks go on, because they are our children."""
        self.control.close()
        self.process.wait()


class _Inner(Server):
    """The server of a command that starts ranks: a fork of the command, made before it runs."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.control, self.pid = control, pid
        self.uploads = "mlflow" in sys.modules

    def close(self) -> None:
        self.control.close()
        os.waitpid(self.pid, 0)


_ENVIRONMENT = dict(os.environ)
_servers: dict[tuple[str, ...], list[Server]] = {LIGHT: [], HEAVY: [], UPLOADING: []}
_commands = dict.fromkeys(_servers, 0)  # the number of commands so far, for each kind of servers
_inner: _Inner | None = None
_quick: Any = None  # of a server that has imported hpctrain, and of its forks
_forks: weakref.WeakSet[Popen] = weakref.WeakSet()
_lock = threading.RLock()


def begin() -> None:
    """Make the present environment, which conftest.py has prepared, that of the servers."""
    _ENVIRONMENT.clear()
    _ENVIRONMENT.update(os.environ)


def restore_start_variables() -> None:
    """Give the variables that are read at the start the values that they had at `begin`."""
    for name in _at_start(os.environ).keys() | _at_start(_ENVIRONMENT).keys():
        if name in _ENVIRONMENT:
            os.environ[name] = _ENVIRONMENT[name]
        else:
            del os.environ[name]


def _next_server(libraries: tuple[str, ...]) -> Server:
    if _inner is not None:
        return _inner
    servers = _servers[libraries]
    servers[:] = [server for server in servers if server.control.fileno() != -1]
    _commands[libraries] += 1
    # A server with torch takes 3 s of CPU time to start, and one with mlflow takes 2 s, so twenty
    # commands share the first one.
    if len(servers) < (1 if libraries != LIGHT and _commands[libraries] < 20 else SERVERS):
        servers.insert(0, Server(*libraries))
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


# The rest of this file runs in the server and its forks.


def serve(control: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Only the forks return, each with its request."""
    # Ctrl-C reaches the whole process group, but the server ends only when the test process ends
    # and so closes the socket.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork keeps none of the other threads"
    while True:
        head, streams, _, _ = socket.recv_fds(control, HEAD.size, 3)
        if not head:
            os._exit(0)
        head += _receive(control, HEAD.size - len(head))
        request: dict[str, Any] = pickle.loads(_receive(control, HEAD.unpack(head)[0]))
        if _quick is not None:
            _quick.prepare(request["words"], request["cwd"])
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            # The intermediate process ends at once, so that the test process becomes the parent.
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
    """Take over what `request` says, and then write the process id to the pipe `ready`."""
    while (parent := os.getppid()) == between:
        time.sleep(0.0002)
    if parent != request["parent"]:
        os._exit(0)  # the test process has ended
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
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.write(ready, HEAD.pack(os.getpid()))
    os.closerange(3, 1000)


def _begin_inner() -> dict[str, Any] | None:
    """Fork a server for this process. Return None here, and the request in forks of the server."""
    global _inner
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _inner = _Inner(ours, pid)
        # The method is replaced, not the class, because other modules have imported the class.
        subprocess.Popen._execute_child = Popen._execute_child
        return None
    ours.close()
    # The server must not hold the command's output open: a reader would wait for the server's end.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    request = serve(theirs)
    theirs.detach()
    return request


def _set_path(request: Mapping[str, Any], rest: list[str]) -> None:
    """Set `sys.path` as in a new Python; `rest` is the part that all processes have."""
    safe = "-P" in request["options"] or request["env"].get("PYTHONSAFEPATH")
    first = [] if safe else [os.getcwd()]
    folders = _python_path(request["env"], os.getcwd())
    sys.path[:] = first + list(dict.fromkeys(folders + rest))


def _drop_ours() -> None:
    """Drop the modules of hpctrain that the server has imported, if Python would find others."""
    global _quick
    known = sys.modules["hpctrain"].__file__
    found = importlib.machinery.PathFinder.find_spec("hpctrain", sys.path)
    if found is not None and found.origin == known:
        return
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("hpctrain", "data_prep", "hydra_plugins"):
            del sys.modules[name]
    if _quick is not None:  # Hydra knows our schema, and has looked for plugins
        _quick = None
        instances = sys.modules["hydra.core.singleton"].Singleton._instances
        for kind in [kind for kind in instances if kind.__name__ == "Plugins"]:
            del instances[kind]
        sys.modules["hydra.core.config_store"].ConfigStore.instance().repo.pop("schema.yaml", None)


def _renew_stream(number: int, name: str, at_once: bool) -> None:
    """Replace `sys.stdin`, `sys.stdout` or `sys.stderr` by one for the file that is open now."""
    old = getattr(sys, name)
    at_once = at_once or old.write_through  # set by PYTHONUNBUFFERED
    mode = "rb" if number == 0 else "wb"
    stream = io.TextIOWrapper(
        os.fdopen(number, mode, 0 if at_once and number else -1, closefd=False),
        old.encoding,
        old.errors,
        newline=None if number == 0 else "\n",
        line_buffering=not at_once and (old.line_buffering or os.isatty(number)),
        write_through=at_once,
    )
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Run the server, and in its forks `python -m MODULE`."""
    global _quick
    here = sys.path[0]
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in (*sys.argv[2:], *OURS[tuple(sys.argv[2:])]):
        importlib.import_module(name)
    if "hpctrain.config.composing.compose" in sys.modules:
        _quick = importlib.import_module("quick_compose").QuickCompose()
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork would copy all pages
    gc.enable()
    assert sys.path[0] == here
    given = _python_path(_ENVIRONMENT, os.getcwd())
    rest = [folder for folder in sys.path[1:] if folder not in given]
    request: dict[str, Any] | None = serve(control)
    control.detach()
    while request is not None:
        work = request
        request = _begin_inner() if work["starts"] else None
    words = work["words"]
    sys.argv = ["-m", *words[1:]]
    sys.orig_argv = [_PYTHON, *work["options"], "-m", *words]
    _set_path(work, rest)
    importlib.invalidate_caches()
    _drop_ours()
    if _quick is not None:
        _quick.install()
    sys.modules["numpy"].random.seed()  # seeded from the system, as in a new process
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _renew_stream(number, name, "-u" in work["options"])
    sys.modules["__main__"] = type(sys)("__main__")
    if {"torch", "mlflow"} & sys.modules.keys():
        _run_without_teardown(words[0])
    else:
        runpy._run_module_as_main(words[0])


def _run_without_teardown(module: str) -> None:
    """Run a module, and end as Python does, but without deleting the imported modules.

    Deleting the modules of torch or mlflow changes many pages of memory. A fork first has to copy
    each of them, which takes 0.3 s of CPU time.
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
        raise  # Python then ends itself by SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.excepthook(*sys.exc_info())
        code = 120  # Python's code for this error
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
