"""Live page: report.html of running runs on a loopback address; the page polls for updates."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.report.page import page_values, render, render_fragment
from posttrain.report.run_view import RunView, open_runs

HOST = "127.0.0.1"
ALLOWED_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # allowed Host headers, against DNS rebinding


class LiveRuns:
    """Page of some runs and its updates; handles one request at a time."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self.views: list[RunView] = open_runs(runs)
        self._lock = threading.Lock()

    def page(self) -> str:
        with self._lock:
            self._refresh()
            return render(self.views, live=True)

    def news(self, have: str) -> str | None:
        """Return JSON of the page's changing parts; None if `have`, the version of the client, is current."""
        with self._lock:
            self._refresh()
            values = {**page_values(self.views), "live": True}
            parts = {
                "status": render_fragment("status.html.j2", values),
                "results": render_fragment("results.html.j2", values),
                "samples": render_fragment("samples.html.j2", values),
                "data": values["data"],
            }
        version = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return None if version == have else json.dumps({"version": version, **parts})

    def _refresh(self) -> None:
        for view in self.views:
            view.refresh()


def make_server(runs: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Return a server for the runs' live page on a loopback address; run it with `serve_forever`.

    port: 0 selects a free port. Raises UserError for a path that is not a run directory, and for a port in use.
    """
    live = LiveRuns(runs)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if (self.headers.get("Host") or "").rpartition(":")[0] not in ALLOWED_HOSTS:
                self._answer(403, "text/plain", "this page is for a browser on this machine")
                return
            path, _, query = self.path.partition("?")
            try:
                if path == "/":
                    self._answer(200, "text/html", live.page())
                elif path == "/news":
                    found = live.news(query.removeprefix("have="))
                    self._answer(200 if found else 204, "application/json", found or "")
                else:
                    self._answer(404, "text/plain", "there is one page: /")
            except ConnectionError:
                pass  # the browser closed the connection
            except Exception as error:  # e.g. a run directory is being removed; the next request may succeed
                self._answer(500, "text/plain", f"{type(error).__name__}: {error}")

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Discard the message: requests are not logged."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used: {error.strerror}", hint="name another --port; 0 takes a free one"
        ) from error
    server.daemon_threads = True
    return server
