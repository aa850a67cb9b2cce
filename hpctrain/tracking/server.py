"""Plain HTTP requests to an MLflow server. They take 1 ms; importing mlflow takes seconds.

`requests`, which MLflow's client uses, too, takes no password along to another host.
"""

import os
import urllib.parse
import urllib.request
from functools import partial
from typing import Any

import requests

from hpctrain.base.errors import RefusedError, TrackingError, deleted_experiment
from hpctrain.base.secrets import without_credentials

_TIMEOUT = 3.0


def check_experiment(uri: str, name: str) -> None:
    """Check that a server answers, and that an experiment is not deleted there, if it has it.

    One that does not answer is an OSError, one that refuses to a RefusedError, as is a deleted
    experiment. A server whose files would go to another one is a TrackingError.
    """
    query = urllib.parse.urlencode({"experiment_name": name})
    status, body = _get(uri, f"experiments/get-by-name?{query}")
    if status == 200:
        found = body["experiment"]
        if found.get("lifecycle_stage", "active") != "active":
            raise deleted_experiment(uri, name, str(found.get("experiment_id", "")))
        check_place(uri, str(found.get("artifact_location", "")))
    elif body.get("error_code") != "RESOURCE_DOES_NOT_EXIST":
        raise _refused(uri, status, body)


def check_place(uri: str, place: str) -> None:
    """Check that a server names no other server for files: it would get the user's password."""
    parts, own = urllib.parse.urlsplit(place), urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https", "mlflow-artifacts") or not parts.netloc:
        return
    if (parts.hostname, parts.port) != (own.hostname, own.port):
        raise TrackingError(
            f"tracking.uri={uri}: it names {place} for the files of its runs, which is another "
            "server, so nothing is sent there, nor your password for MLflow: choose another "
            "tracking.experiment"
        )


def _refused(uri: str, status: int, body: dict[str, Any]) -> Exception:
    message = body.get("message", "not an MLflow server's answer")
    host = urllib.parse.urlsplit(uri).hostname or ""
    proxy = urllib.request.getproxies().get(uri.partition(":")[0])
    if proxy and status in (403, 407) and not body and not urllib.request.proxy_bypass(host):
        where = without_credentials(proxy)
        message = f"so says the proxy {where}: `export no_proxy={host}` goes past it"
    elif status == 403 and not body:
        message = "something before the server forbids it, such as a gateway or a firewall"
    elif status in (401, 403):
        message = (
            f"it refuses {_credentials()[0]}; "
            "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
            "MLFLOW_TRACKING_TOKEN), which jobs inherit; slurm/mlflow-server.sbatch writes them "
            "into server.env"
        )
    # A gateway answers 5xx while the server is down. Other errors do not go away by waiting.
    kind = OSError if status >= 500 else RefusedError
    return kind(f"tracking.uri={uri}: HTTP {status}: {message}")


def _get(uri: str, endpoint: str) -> tuple[int, dict[str, Any]]:
    """Ask MLflow's REST interface; return the HTTP status and the JSON object of the answer."""
    certificate = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or True
    insecure = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true")
    try:
        answer = requests.get(
            f"{uri.rstrip('/')}/api/2.0/mlflow/{endpoint}",
            auth=_credentials()[1],
            timeout=_TIMEOUT,
            verify=not insecure and certificate,
        )
    except requests.RequestException as error:
        raise OSError(str(error).rpartition(": ")[2].rstrip(")\"'")) from error
    try:
        parsed = answer.json()
    except ValueError:
        parsed = {}
    return answer.status_code, parsed if isinstance(parsed, dict) else {}


def _credentials() -> tuple[str, Any]:
    """Return in words, and for requests, what the variables of MLflow's client give to a server."""
    user, token = (
        os.environ.get("MLFLOW_TRACKING_USERNAME"),
        os.environ.get("MLFLOW_TRACKING_TOKEN"),
    )
    if user:
        password = os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
        return "the user and password", (user.encode(), password.encode())
    if token:
        return "the token (MLFLOW_TRACKING_TOKEN)", partial(_with_token, token)
    return "the lack of a password", lambda request: request  # not that of ~/.netrc


def _with_token(token: str, request: Any) -> Any:
    request.headers["Authorization"] = f"Bearer {token}"
    return request
