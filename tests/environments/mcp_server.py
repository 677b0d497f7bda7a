"""An MCP server with faults: it counts calls, and does what the argument `do` of its tool says. It needs only Python."""

import json
import os
import subprocess
import sys
import time

SCHEMA = {"type": "object", "properties": {"do": {"type": "string"}}, "required": ["do"]}


def send(message: object) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message} if isinstance(message, dict) else message), flush=True)


def result(number: int, value: object) -> None:
    send({"id": number, "result": value})


def main(mode: str, path: str | None = None) -> None:
    starts = 0
    if path is not None:  # another description at each start
        with open(path, "a+") as file:
            file.write("x")
            starts = file.tell()
    count = 0
    for line in sys.stdin:
        message = json.loads(line)
        number, method = message.get("id"), message["method"]
        if method == "initialize":
            if mode == "mute":
                time.sleep(600)
            if mode == "refuses":
                send({"id": number, "error": {"code": -32600, "message": "not today"}})
                continue
            if mode == "chatty":
                print("Starting the server ...", flush=True)
            version = "1999-01-01" if mode == "old" else message["params"]["protocolVersion"]
            result(number, {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "test", "version": "1"}})
        elif method == "tools/list":
            tool = {"name": "act", "description": f"Act. {starts}", "inputSchema": SCHEMA}
            if mode == "nameless":
                del tool["name"]
            if mode == "endless":
                result(number, {"tools": [{**tool, "name": f"{number}/{i}"} for i in range(100)], "nextCursor": "more"})
            elif mode == "paged" and "cursor" not in message.get("params", {}):
                result(number, {"tools": [tool], "nextCursor": "2"})
            else:
                result(number, {"tools": [{**tool, "name": "second"} if mode == "paged" else tool]})
        elif method == "tools/call":
            count += 1
            act(number, message["params"], count)


def act(number: int, params: dict, count: int) -> None:
    match params.get("arguments", {}).get("do"):
        case "count":
            result(number, {"content": [{"type": "text", "text": str(count)}]})
        case "path":
            result(number, {"content": [{"type": "text", "text": sys.argv[2]}]})
        case "pid":
            result(number, {"content": [{"type": "text", "text": str(os.getpid())}]})
        case "variables":
            result(number, {"content": [{"type": "text", "text": " ".join(os.environ)}]})
        case "image":
            result(number, {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]})
        case "structure":
            result(number, {"content": [], "structuredContent": {"a": 1}})
        case "surrogate":
            result(number, {"content": [{"type": "text", "text": "a\ud800b\0"}]})
        case "fail":
            result(number, {"content": [{"type": "text", "text": "there is no page 7"}], "isError": True})
        case "params":
            send({"id": number, "error": {"code": -32602, "message": "unknown tool"}})
        case "internal":
            send({"id": number, "error": {"code": -32603, "message": "the disk is full"}})
        case "nothing":
            result(number, "no content")
        case "hang":
            time.sleep(600)
        case "crash":
            print("a bug", file=sys.stderr, flush=True)
            sys.exit(3)
        case "garbage":
            for _ in range(2000):
                print("not JSON")
            sys.stdout.flush()
            time.sleep(600)
        case "huge":
            while True:
                sys.stdout.write("x" * (1 << 20))
        case "loud":
            sys.stderr.write("e" * (64 << 20))
            result(number, {"content": [{"type": "text", "text": "done"}]})
        case "asks":
            send({"id": "s1", "method": "ping"})
            send({"id": "s2", "method": "sampling/createMessage", "params": {}})
            answers = [json.loads(sys.stdin.readline()) for _ in range(2)]
            result(number, {"content": [{"type": "text", "text": json.dumps(answers)}]})
        case "change":
            send({"method": "notifications/tools/list_changed"})
            result(number, {"content": [{"type": "text", "text": "changed"}]})
        case "fork":
            child = subprocess.Popen(["sleep", "600"])
            result(number, {"content": [{"type": "text", "text": str(child.pid)}]})


main(*sys.argv[1:])
