"""A server at 127.0.0.1 with as much of wandb's GraphQL as its client asks for: to read a run, and to save a view."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = {"id": "1", "username": "user", "email": "", "entity": "entity", "flags": "{}", "teams": {"edges": []}}


@dataclass
class WandbServer:
    rows: list[dict[str, Any]] = field(default_factory=list)  # of its only run, entity/project/run_id
    config: dict[str, Any] = field(default_factory=dict)
    views: list[dict[str, Any]] = field(default_factory=list)  # saved ones: the variables of the mutation
    url: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0" * 40}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" in query:
            self.views.append(variables)
            return {"upsertView": {"view": {"id": "1", "name": "nw-saved-v"}, "inserted": True}}
        if "viewer" in query:
            return {"viewer": USER}
        if "minStep" in variables:
            rows = [r for r in self.rows if variables["minStep"] <= r["step"] < variables["maxStep"]]
            return {
                "project": {"run": {"history": [json.dumps(row | {"_step": row["step"]}) for row in rows]}}
            }
        if "parquetHistory" in query:  # none: the client then asks for pages of rows
            return {"project": {"run": {}}}
        if variables.get("name") != "run_id":
            return {"project": {"run": None}}
        last = max(row["step"] for row in self.rows)
        run = dict.fromkeys(("sweepName", "group", "jobType", "commit", "description", "notes"))
        run |= {"id": "1", "projectId": "1", "name": "run_id", "displayName": "the run", "state": "finished"}
        run |= {"config": json.dumps({key: {"value": value} for key, value in self.config.items()})}
        run |= {"tags": [], "readOnly": False, "systemMetrics": "{}", "summaryMetrics": "{}", "user": USER}
        run |= {"createdAt": "2026-01-01T00:00:00Z", "heartbeatAt": "2026-01-01T00:00:00Z"}
        run |= {"historyLineCount": len(self.rows), "historyKeys": {"lastStep": last, "keys": {}}}
        return {"project": {"internalId": "1", "run": run}}


@contextmanager
def wandb_server(**options: Any) -> Iterator[WandbServer]:
    state = WandbServer(**options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = {}
            if self.path == "/graphql":  # the client's telemetry goes elsewhere
                request = json.loads(body)
                data = state.answer(request["query"], request.get("variables") or {})
            answer = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
