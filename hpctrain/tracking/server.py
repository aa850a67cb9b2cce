"""Plain HTTP requests to an MLflow server. They take 1 ms; importing mlflow takes seconds."""

import base64
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from hpctrain.errors import RefusedError, deleted_experiment
from hpctrain.secrets import without_credentials
from hpctrain.tracking.artifact_place import check_of_server

_TIMEOUT = 3.0


def initialise(uri: str, experiment: str) -> None:
    """Create the experiment on a server, unless it exists; OSError: there is no answer now."""
    if experiment_id(uri, experiment) is None:
        status, body = _rest(uri, "experiments/create", {"name": experiment})
        # Another process may have created it meanwhile.
        if status != 200 and body.get("error_code") != "RESOURCE_ALREADY_EXISTS":
            raise _refused(uri, status, body)


def experiment_id(uri: str, experiment: str) -> str | None:
    """Return the server's id of an experiment; None if there is no such experiment."""
    query = urllib.parse.urlencode({"experiment_name": experiment})
    status, body = _rest(uri, f"experiments/get-by-name?{query}")
    if status == 200:
        if body["experiment"].get("lifecycle_stage", "active") != "active":
            raise deleted_experiment(
                uri, experiment, str(body["experiment"].get("experiment_id", ""))
            )
        check_of_server(uri, str(body["experiment"].get("artifact_location", "")))
        return str(body["experiment"].get("experiment_id", ""))
    if body.get("error_code") == "RESOURCE_DOES_NOT_EXIST":
        return None
    raise _refused(uri, status, body)


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
            f"it refuses {_given()}; "
            "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
            "MLFLOW_TRACKING_TOKEN), which jobs inherit; slurm/mlflow-server.sbatch writes them "
            "into server.env"
        )
    # A gateway answers 5xx while the server is down. Other errors do not go away by waiting.
    kind = OSError if status >= 500 else RefusedError
    return kind(f"tracking.uri={uri}: HTTP {status}: {message}")


def _rest(
    uri: str, endpoint: str, body: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Call MLflow's REST interface; return the HTTP status and the JSON object of the answer."""
    request = urllib.request.Request(
        f"{uri.rstrip('/')}/api/2.0/mlflow/{endpoint}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **_authorization()},
    )
    tls = urllib.request.HTTPSHandler(context=_tls(uri))
    try:
        with urllib.request.build_opener(tls, _Redirect).open(request, timeout=_TIMEOUT) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP server: {error!r}") from error
    try:
        parsed = json.loads(content)
    except ValueError:
        parsed = {}
    return status, parsed if isinstance(parsed, dict) else {}


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects. Credentials are for the host that the user has configured only."""

    def redirect_request(
        self,
        request: urllib.request.Request,
        file: Any,
        code: int,
        text: str,
        headers: Any,
        to: str,
    ) -> urllib.request.Request | None:
        """Return the request that follows a redirect, without credentials for another host."""
        following = super().redirect_request(request, file, code, text, headers, to)
        before, after = urllib.parse.urlsplit(request.full_url), urllib.parse.urlsplit(to)
        same = (before.hostname, before.port) == (after.hostname, after.port)
        to_tls = before.hostname == after.hostname and after.scheme == "https"
        if following is not None and not same and not to_tls:
            following.remove_header("Authorization")
        return following


def _given() -> str:
    header = _authorization().get("Authorization", "")
    kinds = {"Basic": "the user and password", "Bearer": "the token (MLFLOW_TRACKING_TOKEN)"}
    return kinds.get(header.partition(" ")[0], "the lack of a password")


def _authorization() -> dict[str, str]:
    """Return the HTTP header, from the same environment variables that MLflow's client reads."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if user:
        secret = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls(uri: str) -> ssl.SSLContext | None:
    if not uri.startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
