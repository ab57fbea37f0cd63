"""Ask a model over NATS: python ask_over_nats.py nats://127.0.0.1:4222 smollm2 "What is the capital of France?" """

import asyncio
import json
import re
import sys

import nats


async def main(url: str, model: str, question: str) -> None:
    client = await nats.connect(url)
    answers = await client.subscribe(inbox := client.new_inbox())
    request = json.dumps({"messages": [{"role": "user", "content": question}]}).encode()
    name = re.sub(r"[^a-z0-9_]+", "-", model.lower()).strip("-")  # the model as one token of a subject
    await client.publish(f"distserve.v1.requests.{name}", request, reply=inbox)
    while (answer := await answers.next_msg(timeout=60)).data:  # an empty message ends the answer
        if "error" in (message := json.loads(answer.data)):
            sys.exit(message["error"]["message"])
        print(*(choice["delta"].get("content", "") for choice in message["choices"]), sep="", end="", flush=True)
    sys.exit(f"nobody serves {model!r} at {url}" if answer.headers else print())  # only NATS' own answer has headers


asyncio.run(main(*sys.argv[1:]))
