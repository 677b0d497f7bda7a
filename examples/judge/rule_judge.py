"""Serve grades by rule, with the protocol of a judge model, so that the example runs without one.

python examples/judge/rule_judge.py 8001
"""

import http.server
import json
import re
import sys


def reply(prompt: str) -> str:
    """Return 5 points for the right result, plus 5 for written-out steps, or with criteria a verdict on each of the two."""
    answer, solution = re.findall(r"^Right result: (.*)\nSolution: (.*)", prompt, re.MULTILINE | re.DOTALL)[0]
    results = re.findall("<answer>(.*?)</answer>", solution)
    verdicts = {"right": results[-1:] == [answer], "steps": solution.count("=") >= 2}
    return json.dumps(verdicts) if "- right:" in prompt else str(5 * sum(verdicts.values()))


class Handler(http.server.BaseHTTPRequestHandler):
    """Handler of chat completion requests."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Reply to the last message."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = reply(request["messages"][-1]["content"])
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Server(http.server.ThreadingHTTPServer):
    """Server for many concurrent requests."""

    request_queue_size = 256


def main(port: int) -> None:
    """Serve on this machine until interrupted."""
    with Server(("127.0.0.1", port), Handler) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}/v1", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
