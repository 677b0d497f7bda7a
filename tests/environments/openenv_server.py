"""An OpenEnv server with faults, which speaks the wire of openenv 0.10.0: `app`, as a package with a server has one.

Its replies have the form of those of `openenv.core.env_server.http_server`. `tests/e2e/test_foreign.py` runs the real one.
"""

import asyncio
import json
import os
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

MAX_SESSIONS = 2
FIELDS: dict[str, Any] = {
    "guess": {"type": "integer"},
    "text": {"type": "string"},
}
_open: set[int] = set()


async def schema(request: Request) -> JSONResponse:
    kind = os.environ.get("OPENENV_ACTION", "text")
    if kind == "tools":
        action = {"properties": {"tool_name": {"type": "string"}, "arguments": {}}, "required": ["tool_name"]}
    elif kind == "both":
        action = {"properties": FIELDS, "required": ["guess", "text"]}
    elif kind == "none":
        return JSONResponse({"detail": "Not Found"}, status_code=404)
    else:
        action = {"properties": {"metadata": {"type": "object"}, kind: FIELDS[kind]}, "required": [kind]}
    return JSONResponse({"action": action, "observation": {}, "state": {}})


async def session(socket: WebSocket) -> None:
    await socket.accept()
    if len(_open) == MAX_SESSIONS:
        await socket.send_json(error("CAPACITY_REACHED", f"all {MAX_SESSIONS} sessions are used"))
        await socket.close()
        return
    _open.add(id(socket))
    steps = 0
    try:
        while True:
            message = json.loads(await socket.receive_text())
            if message["type"] == "reset":
                steps, given = 0, message["data"]
                if given.get("do") == "done":
                    await socket.send_json(observed({"text": "over"}, done=True))
                    continue
                await socket.send_json(observed({"text": json.dumps(given, sort_keys=True), "left": None}, reward=None))
            elif message["type"] == "state":
                await socket.send_json({"type": "state", "data": {"episode_id": "e", "step_count": steps, "is_won": True}})
            elif message["type"] == "step":
                steps += 1
                await act(socket, message["data"])
            else:
                return
    except WebSocketDisconnect:
        pass
    finally:
        _open.discard(id(socket))


async def act(socket: WebSocket, action: dict[str, Any]) -> None:
    if action.get("type") == "list_tools":
        tool = {"name": "echo", "description": "Repeat.", "input_schema": {"type": "object"}}
        await socket.send_json(observed({"tools": [tool]}))
        return
    if action.get("type") == "call_tool":
        if action["tool_name"] != "echo":
            await socket.send_json(
                observed({"tool_name": "x", "error": {"error_type": "tool_not_found", "message": "unknown"}})
            )
        else:
            result = {"data": action["arguments"].get("text"), "content": []}
            await socket.send_json(observed({"tool_name": "echo", "result": result}, reward=0.5))
        return
    if not isinstance(action.get("text", ""), str) or not isinstance(action.get("guess", 0), int):
        details = [{"loc": ["guess"], "msg": "Input should be a valid integer", "type": "int_type"}]
        await socket.send_json({"type": "error", "data": {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": details}})
        return
    match action.get("text"):
        case "pid":
            await socket.send_json(observed({"text": str(os.getpid())}))
        case "raise":
            await socket.send_json(error("EXECUTION_ERROR", "the wall is in the way"))
        case "hang":
            await asyncio.sleep(600)
        case "crash":
            os._exit(3)
        case "garbage":
            await socket.send_text("garbage")
        case "shape":
            await socket.send_json({"type": "observation", "data": []})
        case "huge":
            await socket.send_json(observed({"text": "x" * (8 << 20)}))
        case "infinite":
            await socket.send_text('{"type": "observation", "data": {"observation": {}, "reward": Infinity, "done": true}}')
        case "word":
            await socket.send_json(observed({"text": "a"}, reward="much"))
        case "close":
            await socket.close()
        case "end":
            await socket.send_json(observed({"text": "end"}, reward=1, done=True))
        case _:
            await socket.send_json(observed({"text": "go on", "left": 3}, reward=0.25))


def observed(fields: dict[str, Any], *, reward: object = 0.0, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {**fields, "metadata": {}}, "reward": reward, "done": done}}


def error(code: str, text: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": text, "code": code}}


app = Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", session)])
