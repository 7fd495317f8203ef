"""Stream a chat reply with the `openai` package: `python examples/stream.py "Why is the sky blue?"`.

OPENAI_BASE_URL and OPENAI_API_KEY choose another server and key.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(question: str) -> None:
    """Print the reply as it comes, then what it cost."""
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none-needed"),
    )
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:
            usage = chunk.usage
            print(f"\n\n[{usage.prompt_tokens} tokens in, {usage.completion_tokens} out]")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Tell me a short story about a lighthouse.")
