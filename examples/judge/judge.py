"""A reward that grades each completion with a model behind an OpenAI-compatible endpoint."""

import json
import os
import re
import urllib.request
from collections.abc import Mapping
from typing import Any

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8001/v1")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
KEY = os.environ.get("JUDGE_API_KEY", "")
PROMPT = """\
Grade the solution of a student from 0 to 10. Give 5 points for the right result and 5 points if every step is written out.
Reply with the number only.

Question: {question}
Right result: {answer}
Solution: {completion}"""


def judge(completion: str, entry: Mapping[str, Any]) -> float:
    """Return the judge's grade of a completion, from 0 to 1.

    Raises:
        ValueError: The reply contains no number; the completion then has no reward.
    """
    prompt = PROMPT.format(question=entry["question"], answer=entry["answer"], completion=completion)
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "temperature": 0.0, "max_tokens": 8}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{URL}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10.0) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"]
    grade = re.search(r"\d+", text)
    if grade is None:
        raise ValueError(f"the judge replied without a number (got {text!r:.60})")
    return min(int(grade[0]), 10) / 10
