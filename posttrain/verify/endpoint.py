"""Client for OpenAI-compatible chat endpoints, with retries, a disk cache and a request budget.

A request depends on the arguments alone, so that the same question has the same cache entry in every worker and every
run. The API key comes from an environment variable and appears in no message, log or cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Required
from urllib.parse import urlsplit

from typing_extensions import TypedDict  # pydantic on Python 3.11 requires this one

from posttrain.path_resolution import PathText
from posttrain.redact import is_variable, without_secrets
from posttrain.verify import http_client
from posttrain.verify.contract import ExplainedFailure
from posttrain.verify.http_client import Cancellation, PostError

SCRIPTED = "scripted:"  # an endpoint of this form always replies with the text after the prefix: for examples and tests
MAX_PAUSE_SECONDS = 30.0  # maximum seconds between two tries, even if a server asks for more
_SHOWN = 300  # maximum characters of a server's error in messages
_TRANSIENT = (408, 409, 425, 429)  # retried, as are all status codes from 500


class JudgeError(ExplainedFailure):
    """Raised if there is no reply: the endpoint is unusable or unavailable, or the budget is spent.

    Never turned into a score.
    """


class Settings(TypedDict, total=False):
    """Endpoint settings as written in a recipe; `Endpoint` documents each key."""

    url: Required[str]
    model: Required[str]
    key_env: str | None
    temperature: float
    max_tokens: int
    request_s: float
    retries: int
    budget: int | None
    cache: Annotated[str, PathText(created=True, words=("", "none"))]


# Pydantic reads this attribute if it is set. Inside the class body, type checkers would take it for a key.
setattr(Settings, "__pydantic_config__", {"extra": "forbid"})  # noqa: B010


@dataclass(frozen=True)
class Endpoint:
    """Address and request settings of a judge.

    url: up to and including /v1. key_env: environment variable with the API key, which is sent to this address only;
    default: OPENAI_API_KEY for https://api.openai.com, none for other addresses. max_tokens: per reply; a reply that is
    cut there is an error. request_s: time
    limit of one request from start to end; retries: further attempts after a transient failure or a truncated or
    invalid reply. budget: maximum requests of all workers of one training process, not counting replies from the cache.
    cache: a folder, relative to the recipe's; "" is the user's cache folder, "none" disables the cache.
    """

    url: str
    model: str
    key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    request_s: float = 60.0
    retries: int = 4
    budget: int | None = None
    cache: str = ""

    @property
    def folder(self) -> Path | None:
        """Folder of the reply cache; None if the cache is disabled."""
        if self.cache == "none":
            return None
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(self.cache).expanduser() if self.cache else Path(home) / "posttrain" / "judge"


class Reply(NamedTuple):
    """Text of a reply, and whether it came from the cache."""

    text: str
    cached: bool


def problem_of(endpoint: Endpoint) -> str:
    """Return why this endpoint cannot be used, or ''; checked without sending a request."""
    if endpoint.url.startswith(SCRIPTED):
        return ""
    if not _is_address(endpoint.url):
        return f"endpoint `{without_secrets(endpoint.url)}` is not an http address; write e.g. http://127.0.0.1:8000/v1"
    if not http_client.available():
        return "a judge on a server needs httpx2, which is not installed: pip install 'posttrain[train]'"
    if (variable := key_variable(endpoint)) and not _key(endpoint):
        if not is_variable(variable):  # possibly the key itself, so it is not printed
            return "key_env names an environment variable, such as JUDGE_API_KEY; the API key itself stands in it"
        return f"the environment variable {variable} (key_env) is not set; it holds the API key"
    return ""


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535, or an incomplete IPv6 address
        return False


def ask(
    endpoint: Endpoint, messages: Sequence[Mapping[str, str]], seed: int, cancellation: Cancellation | None = None
) -> Reply:
    """Return the reply to a chat, from the cache if possible. After `cancellation` no further request is sent. Raises
    JudgeError."""
    if endpoint.url.startswith(SCRIPTED):
        return Reply(endpoint.url.removeprefix(SCRIPTED), cached=False)
    if problem := problem_of(endpoint):
        raise JudgeError(problem)
    body = _body(endpoint, messages, seed)
    path = None if endpoint.folder is None else _cache_path(endpoint.folder, endpoint.url, body)
    if path is not None and (known := _read_cached_reply(path)) is not None:
        return Reply(known, cached=True)
    text = _request_with_retries(endpoint, body, cancellation or Cancellation())
    if path is not None:
        _write_cached_reply(path, text)
    return Reply(text, cached=False)


def _body(endpoint: Endpoint, messages: Sequence[Mapping[str, str]], seed: int) -> dict[str, Any]:
    return {
        "model": endpoint.model,
        "messages": [dict(message) for message in messages],
        "temperature": endpoint.temperature,
        "max_tokens": endpoint.max_tokens,
        "seed": seed,
    }


def _request_with_retries(endpoint: Endpoint, body: Mapping[str, Any], cancellation: Cancellation) -> str:
    """Send the request until there is a reply, a permanent error, or no retry left. Raises JudgeError."""
    what = ""
    for attempt in range(endpoint.retries + 1):
        retry_after = ""
        try:
            cancellation.check()
            _charge_budget(endpoint)
            answer = http_client.post_json(
                f"{endpoint.url.rstrip('/')}/chat/completions",
                body,
                _headers(endpoint),
                total_s=endpoint.request_s,
                cancellation=cancellation,
            )
            if answer.status < 400:
                return _text(answer.body, endpoint)
            what = f"status {answer.status}: {_redact_error(answer.body.decode(errors='replace'), endpoint)}"
            retry_after = answer.headers.get("retry-after", "")
            if answer.status not in _TRANSIENT and answer.status < 500:
                hint = "; see key_env" if answer.status in (401, 403) else ""
                raise JudgeError(f"{without_secrets(endpoint.url)} refused the request: {what}{hint}")
        except PostError as error:
            what = _redact_error(str(error), endpoint)
            if error.lasting:
                raise JudgeError(f"{without_secrets(endpoint.url)} cannot be used: {what}") from None
        except ValueError as error:
            what = _redact_error(f"unreadable reply: {error}", endpoint)
        if attempt < endpoint.retries:
            cancellation.wait(_pause(attempt, retry_after))
    raise JudgeError(
        f"{without_secrets(endpoint.url)} gave no reply in {endpoint.retries + 1} tries; last error: {what}"
    )


def _headers(endpoint: Endpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if (key := _key(endpoint)) else {}


def key_variable(endpoint: Endpoint) -> str:
    """Return the environment variable with the API key: `key_env`, or OPENAI_API_KEY for OpenAI's own address only."""
    if endpoint.key_env:
        return endpoint.key_env
    with contextlib.suppress(ValueError):
        address = urlsplit(endpoint.url)
        return "OPENAI_API_KEY" if (address.scheme, address.hostname) == ("https", "api.openai.com") else ""
    return ""


def _key(endpoint: Endpoint) -> str:
    return os.environ.get(key_variable(endpoint), "").strip()


def _text(body: bytes, endpoint: Endpoint) -> str:
    """Return the text of the first choice. Raises ValueError for a body without one, JudgeError for a text that was cut
    at max_tokens: a part of a verdict is none, and the same request would be cut again."""
    try:
        choice = json.loads(body)["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"no choices[0].message.content ({type(error).__name__})") from None
    if finish == "length":
        raise JudgeError(
            f"the reply of {endpoint.model} was cut at {endpoint.max_tokens} tokens and is not used: raise max_tokens"
            " (params: endpoint)"
        )
    if not isinstance(text, str):
        raise ValueError("a reply without text")
    return text


def _redact_error(text: str, endpoint: Endpoint) -> str:
    """Shorten an error's text and redact the key, which some servers repeat."""
    key = _key(endpoint)
    text = text.replace(key, "***") if key else text
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _pause(attempt: int, retry_after: str) -> float:
    """Return the seconds before the next try: exponential backoff with jitter, or the server's retry-after."""
    with contextlib.suppress(ValueError):
        return min(MAX_PAUSE_SECONDS, max(0.0, float(retry_after)))
    return min(MAX_PAUSE_SECONDS, 0.5 * 2**attempt) * random.uniform(0.5, 1.0)


def _cache_path(folder: Path, url: str, body: Mapping[str, Any]) -> Path:
    """Return the cache file of a reply, named by the hash of everything the reply depends on."""
    text = json.dumps([url, body], sort_keys=True, ensure_ascii=False)
    name = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return folder / name[:2] / f"{name}.json"


def _read_cached_reply(path: Path) -> str | None:
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["reply"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # missing or invalid: ask again
    return text if isinstance(text, str) else None


def _write_cached_reply(path: Path, text: str) -> None:
    """Write a reply to the cache: to a temporary file that is then renamed, so that no worker reads a partial reply."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump({"reply": text, "time": time.time()}, file)
        os.replace(file.name, path)
    except OSError as error:
        raise JudgeError(
            f"the reply cannot be written to the cache (params: cache; `none` disables it): {error}"
        ) from None


def _charge_budget(endpoint: Endpoint) -> None:
    """Count one request against the budget of the parent process. Raises JudgeError when the budget is spent."""
    if endpoint.budget is None:
        return
    try:
        _increment_request_count(endpoint, endpoint.budget)
    except (OSError, ValueError) as error:
        raise JudgeError(f"requests cannot be counted (params: budget): {error}") from None


def _increment_request_count(endpoint: Endpoint, budget: int) -> None:
    folder = Path(tempfile.gettempdir()) / f"posttrain-judge-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    what = json.dumps(asdict(endpoint), sort_keys=True)
    name = hashlib.sha256(f"{os.getppid()} {_process_start_time(os.getppid())} {what}".encode()).hexdigest()[:24]
    with open(folder / name, "a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        spent = int(file.read() or 0)
        if spent >= budget:
            raise JudgeError(
                f"the budget of {budget} requests to {without_secrets(endpoint.url)} is spent (params: budget)"
            )
        file.seek(0)
        file.truncate()
        file.write(str(spent + 1))


def _process_start_time(pid: int) -> str:
    """Return the start time of a process, which distinguishes it from a later process with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
