// Sends a prompt, shows the answer as it comes, and draws where its time went.
import { byId, bytes, drawn, make, say, seconds, share } from "./dom.js";

let stopping = null; // of the request under way

function body() {
  const wanted = {
    model: byId("try-model").value,
    messages: [{ role: "user", content: byId("prompt").value }],
    max_tokens: Number(byId("max-tokens").value),
    priority: byId("priority").value,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
  };
  const promise = byId("promise").value;
  if (promise) wanted.ttft_slo_ms = Number(promise);
  return JSON.stringify(wanted);
}

const DONE = Symbol("done");

// Server-sent events: the data of each, parsed, and DONE for [DONE]; nothing comes after it.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n").trim();
      if (data === "[DONE]") {
        yield DONE;
        return;
      }
      if (data) yield JSON.parse(data);
    }
  }
}

async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300);
  }
}

function said(text, failed = false) {
  say(byId("said"), text);
  byId("said").classList.toggle("failed", failed);
}

async function send() {
  const key = byId("key").value;
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = byId("answer");
  answer.replaceChildren();
  byId("timeline").hidden = true;
  byId("outcome").hidden = false;
  said("waiting for the first token");
  stopping = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  const began = performance.now();
  const came = []; // seconds from the beginning to each piece
  let usage = null;
  let timings = null;
  let reason = "";
  let whole = false;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body: body(), signal: stopping.signal });
    if (!response.ok) throw new Error(`${response.status}: ${await problem(response)}`);
    for await (const chunk of events(response)) {
      if (chunk === DONE) {
        whole = true;
        break;
      }
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      if (!choice?.delta?.content) continue;
      if (!came.length) said("answering");
      came.push((performance.now() - began) / 1000);
      answer.append(document.createTextNode(choice.delta.content));
      answer.scrollTop = answer.scrollHeight;
    }
    if (!whole && !reason) throw new Error("the answer broke off");
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const tokens = usage ? `${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} output tokens; ` : "";
    said(`${tokens}ended: ${reason || "done"}`);
    if (timings) timeline(timings, came, (performance.now() - began) / 1000);
  } catch (error) {
    if (error.name === "AbortError") said("stopped");
    else said(`failed: ${error.message}`, true);
  } finally {
    stopping = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
  }
}

// What is between the stages, and told by nobody: the gateway's work, the bus, the way of the tokens.
export function stages(t) {
  const before = Math.max(0, t.ttft_s - t.queue_s - t.prefill_s);
  const after = Math.max(0, t.total_s - Math.max(t.ttft_s, t.queue_s + t.prefill_s) - t.transfer_s - t.decode_s);
  return [
    { kind: "gap", name: "gateway and bus", s: before },
    { kind: "queue", name: "queue", s: t.queue_s },
    { kind: "prefill", name: "prefill", s: t.prefill_s },
    { kind: "transfer", name: "transfer", s: t.transfer_s },
    { kind: "decode", name: "decode", s: t.decode_s },
    { kind: "gap", name: "rest", s: after },
  ];
}

function timeline(t, came, seenS) {
  const all = stages(t);
  const total = all.reduce((sum, stage) => sum + stage.s, 0) || 1;
  const scale = 1000 / Math.max(total, t.total_s, came.at(-1) ?? 0);
  const bar = byId("bar");
  bar.replaceChildren();
  let x = 0;
  for (const stage of all) {
    bar.append(drawn("rect", { class: stage.kind, x: x * scale, y: 0, width: stage.s * scale, height: 26 }));
    x += stage.s;
  }
  bar.append(drawn("line", { class: "first", x1: t.ttft_s * scale, x2: t.ttft_s * scale, y1: 0, y2: 30 }));
  for (const at of came) bar.append(drawn("line", { class: "tick", x1: at * scale, x2: at * scale, y1: 33, y2: 46 }));
  bar.setAttribute("aria-label", `Timeline: ${all.map((stage) => `${stage.name} ${seconds(stage.s)}`).join(", ")}`);
  byId("legend").replaceChildren(
    ...all.map((stage) => make("li", stage.kind, `${stage.name} ${seconds(stage.s)} (${share(stage.s / total)})`)),
  );
  const by = t.kv_bytes ? `${bytes(t.kv_bytes)} of KV by ${t.transport} as ${t.traffic_class}. ` : "";
  const here = came.length ? `${seconds(came[0])} and ${seconds(seenS)} as seen here` : "no text came";
  say(byId("beside"), `First token ${seconds(t.ttft_s)} (the mark), whole answer ${seconds(t.total_s)}; ${here}. ${by}Below the bar: when each piece of text came here.`);
  byId("timeline").hidden = false;
}

byId("try").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!stopping) send();
});
byId("stop").addEventListener("click", () => stopping?.abort());
