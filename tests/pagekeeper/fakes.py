"""Stand-ins for the three processes: the same files, the same URLs, and nothing behind them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from pagekeeper.supervisor import Spec

SERVER = """
    import json, os, signal, sys, http.server
    run_dir, file, key = sys.argv[1:4]
    answers = json.loads(sys.argv[4])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())
        def log_message(self, *args):
            pass
    def end(number, frame):
        print(file, "ending", flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    with open(os.path.join(run_dir, file), "w") as out:
        json.dump({key: f"http://127.0.0.1:{server.server_port}"}, out)
    server.serve_forever()
"""

EXECUTOR = """
    import signal, sys, time
    for percent in (0, 50, 100):
        print(f"12:00:00 I executor-0 loading tiny {percent}% (weights)", flush=True)
    print("12:00:00 I executor-0 warming up", flush=True)
    signal.signal(signal.SIGTERM, lambda *args: sys.exit(0))
    while True:
        time.sleep(60)
"""

STATE = """{"/health": {}, "/v1/state": {"epoch": 7, "pools": [
    {"name": "tiny", "total": 10, "used": 1, "cached": 2, "free": 7, "sequences": 1}]}}"""
API = """{"/ready": {}, "/v1/models": {"data": [{"id": "tiny"}]}}"""


def three(run_dir: Path, executor: str = EXECUTOR) -> list[Spec]:
    """memd, executor and gateway; `executor` is the code of the second."""

    def spec(name: str, code: str, *argv: str) -> Spec:
        python = (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code))
        return Spec(name, (*python, *argv))

    return [
        spec("memd", SERVER, str(run_dir), "memd.json", "admin", STATE),
        spec("executor", executor),
        spec("gateway", SERVER, str(run_dir), "gateway.json", "url", API),
    ]
