"""A chat with a model that can run Python: what it writes runs in a sandbox and keeps its variables.

    MODEL=gpt-4.1 OPENAI_API_KEY=… python examples/chat_interpreter.py "Plot x² from 0 to 10 and tell me its mean."

Any endpoint that speaks OpenAI's chat protocol will do: set OPENAI_BASE_URL. Pictures are saved as picture-1.png, ….
"""

import base64
import itertools
import json
import os
import sys
from pathlib import Path

import httpx

from skerry import Execution, Sandbox

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
ABOUT = "Run Python, which keeps its variables and has numpy, pandas and matplotlib. Pictures are shown to the user."
TOOLS = [{"type": "function", "function": {"name": "run_python", "description": ABOUT, "parameters": CODE}}]
pictures = itertools.count(1)


def told(execution: Execution) -> str:
    """What the model gets to know; pictures go to the user, as files."""
    shown = []
    for result in execution.results:
        if result.png:
            path = Path(f"picture-{next(pictures)}.png")
            path.write_bytes(base64.b64decode(result.png))
            print(f"[{path}]")
            shown.append(f"A picture, saved as {path}: {json.dumps(result.chart)[:2000]}")
        elif result.text:
            shown.append(result.text[:10_000])
    said = {"results": shown, "stdout": execution.stdout[-10_000:], "stderr": execution.stderr[-10_000:]}
    error = execution.error and "\n".join(execution.error.traceback or [execution.error.message])
    return json.dumps({**said, "error": error, "notices": execution.notices})


def answer(sandbox: Sandbox, model: httpx.Client, messages: list[dict]) -> str:
    while True:
        request = {"model": os.environ.get("MODEL", "gpt-4.1"), "messages": messages, "tools": TOOLS}
        message = model.post("chat/completions", json=request).raise_for_status().json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            code = json.loads(call["function"]["arguments"])["code"]
            execution = sandbox.run_code(code, timeout=60)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told(execution)})


if __name__ == "__main__":
    base = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    with Sandbox(ephemeral=True) as sandbox, httpx.Client(base_url=base, headers=headers, timeout=300) as model:
        print(answer(sandbox, model, [{"role": "user", "content": " ".join(sys.argv[1:])}]))
