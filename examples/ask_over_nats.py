"""Ask a model over NATS: python ask_over_nats.py nats://127.0.0.1:4222 smollm2 "What is the capital of France?" """

import asyncio
import json
import sys

import nats


async def main(url: str, model: str, question: str) -> None:
    client = await nats.connect(url)
    answers = await client.subscribe(inbox := client.new_inbox())
    request = {"messages": [{"role": "user", "content": question}]}
    await client.publish(f"distserve.v1.requests.{model}", json.dumps(request).encode(), reply=inbox)
    while data := (await answers.next_msg(timeout=60)).data:  # an empty message ends the answer
        message = json.loads(data)
        if "error" in message:
            sys.exit(message["error"]["message"])
        for choice in message["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
    print()


asyncio.run(main(*sys.argv[1:]))
