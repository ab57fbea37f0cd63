// Asks /status each second while the page can be seen, and shows what it says.
import { byId, bytes, count, drawn, keep, make, rows, say, seconds, share } from "./dom.js";

const EVERY_MS = 1000;
const LONGEST_MS = 30000; // between tries while there is no answer
const ANSWER_MS = 6000;

const pill = (state) => (cell) => {
  let mark = cell.querySelector(".pill");
  if (!mark) cell.append((mark = make("span")));
  mark.className = `pill s-${state}`;
  say(mark, state);
};

function tiles(gateway) {
  const shown = [
    ["requests/s", count(gateway.requests_per_s)],
    ["good/s", count(gateway.good_requests_per_s)],
    ["tokens/s", count(gateway.tokens_per_s)],
    ["live", count(gateway.num_live)],
    ["failed/s", count(gateway.failed_per_s), gateway.failed_per_s > 0],
    ["breaker", gateway.breaker.replace("_", "-"), gateway.breaker.endsWith("open")],
    ["bus", gateway.bus_connected ? "connected" : "cut off", !gateway.bus_connected],
    ["up for", seconds(Math.round(gateway.uptime_s))],
  ];
  byId("tiles").title = `${gateway.bus_reconnects} reconnections to the bus, ${gateway.bus_drops} messages dropped`;
  const build = () => {
    const tile = make("div");
    tile.append(make("dt"), make("dd"));
    return tile;
  };
  keep(byId("tiles"), shown, (tile) => tile[0], build, (tile, [name, value, alarm]) => {
    say(tile.children[0], name);
    say(tile.children[1], value);
    tile.children[1].classList.toggle("alarm", Boolean(alarm));
  });
}

// A line through what there is, and a dot for each second between two without a value.
function path(values, most) {
  const step = 600 / Math.max(1, values.length - 1);
  let line = "";
  let dots = "";
  values.forEach((value, i) => {
    if (value === null) return;
    const at = `${(i * step).toFixed(1)} ${(76 - (72 * value) / (most || 1)).toFixed(1)}`;
    const before = (values[i - 1] ?? null) !== null;
    line += before ? `L${at}` : `M${at}`;
    if (!before && (values[i + 1] ?? null) === null) dots += `M${at}L${at}`;
  });
  return [line, dots];
}

function lines(svg, series, words) {
  const most = Math.max(0, ...series.flatMap(([, values]) => values.filter((value) => value !== null)));
  const shapes = series.flatMap(([name, values]) => {
    const [line, dots] = path(values, most);
    return [drawn("path", { class: name, d: line }), drawn("path", { class: `${name} dot`, d: dots })];
  });
  if (svg.id === "tokens-line" && series[0][1].length > 1) {
    shapes.unshift(drawn("path", { class: "area", d: `M0 76${path(series[0][1], most)[0].replace(/^M/, "L")}L600 76Z` }));
  }
  svg.replaceChildren(...shapes);
  svg.setAttribute("aria-label", words(most));
}

function history(seconds_) {
  const full = Array(Math.max(0, 60 - seconds_.length)).fill({ ttft_p50_s: null, ttft_p99_s: null, num_tokens: 0 });
  const told = [...full, ...seconds_];
  const wordsOf = (most) => `Time to first token of each of the last ${told.length} seconds, at most ${seconds(most)}`;
  lines(byId("ttft-line"), [["p99", told.map((s) => s.ttft_p99_s ?? null)], ["p50", told.map((s) => s.ttft_p50_s ?? null)]], wordsOf);
  lines(byId("tokens-line"), [["tokens", told.map((s) => s.num_tokens ?? 0)]], (most) => `Tokens of each of the last ${told.length} seconds, at most ${count(most)}`);
  const p99s = told.map((s) => s.ttft_p99_s ?? 0);
  say(byId("ttft-scale"), `top: ${seconds(Math.max(...p99s))}, ${told.length} s`);
  say(byId("tokens-scale"), `top: ${count(Math.max(...told.map((s) => s.num_tokens ?? 0)))}, ${told.length} s`);
}

function times(gateway) {
  const names = { ttft: "first token (TTFT)", itl: "between tokens (ITL)", tpot: "per token (TPOT)", e2e: "whole answer", queue: "queue", prefill: "prefill", transfer: "transfer", decode: "decode" };
  const shown = Object.entries(names).map(([key, name]) => ({ name, of: gateway[key] }));
  rows(byId("times"), shown, (row) => row.name, ({ name, of }) => [name, seconds(of.p50), seconds(of.p90), seconds(of.p99), count(of.count)]);
}

function classes(gateway) {
  const shown = ["vip", "normal", "batch"].filter((name) => gateway.classes[name]).map((name) => [name, gateway.classes[name]]);
  const kept = (of) => (of.num_promised ? share(of.num_attained / of.num_promised, 1) : "–");
  rows(byId("classes"), shown, ([name]) => name, ([name, of]) => [name, count(of.num_requests), count(of.num_promised), kept(of), count(of.num_refused)], "no requests yet");
}

function routes(gateway) {
  const all = Object.values(gateway.routes_per_s).reduce((sum, rate) => sum + rate, 0);
  const shown = Object.entries(gateway.routes_per_s).filter(([, rate]) => rate > 0);
  rows(byId("routes"), shown, ([kind]) => kind, ([kind, rate]) => [kind, count(rate), share(rate / all)]);
}

const blocks = (service) => (cell) => {
  if (!service.total_blocks) return say(cell, "–");
  const used = service.total_blocks - service.free_blocks;
  const sizes = { used, cached: service.cached_blocks, free: service.free_blocks - service.cached_blocks };
  let bar = cell.querySelector("svg");
  if (!bar) {
    const both = make("span", "kv");
    bar = drawn("svg", { class: "blocks", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img" });
    for (const name of Object.keys(sizes)) bar.append(drawn("rect", { class: name, y: 0, height: 10 }));
    both.append(bar, make("span"));
    cell.replaceChildren(both);
  }
  let x = 0;
  Object.values(sizes).forEach((size, i) => {
    const width = (100 * Math.max(0, size)) / service.total_blocks;
    bar.children[i].setAttribute("x", x);
    bar.children[i].setAttribute("width", width);
    x += width;
  });
  bar.setAttribute("aria-label", `${used} used, ${sizes.cached} cached, ${sizes.free} free`);
  say(bar.nextElementSibling, `${count(used + sizes.cached)} / ${count(service.total_blocks)}`);
};

const named = (service) => (cell) => {
  if (!cell.children.length) cell.append(make("span"), make("small"));
  say(cell.children[0], service.id);
  say(cell.children[1], service.role);
};

function services(all) {
  rows(byId("services"), all, (service) => service.id, (service) => {
    const isWorker = service.role === "prefill" || service.role === "decode";
    return [
      named(service),
      pill(service.reached ? service.status : "silent"),
      service.role === "kvstore" ? "–" : count(service.num_running),
      isWorker ? count(service.num_waiting) : "–",
      blocks(service),
      service.role === "kvstore" ? "–" : count(service.tokens_per_s),
      service.role === "decode" ? seconds(service.step_s) : "–",
      isWorker && service.mean_batch !== null ? count(service.mean_batch) : "–",
      share(service.kv_hit_rate),
      share(service.gpu_util),
      service.transports_in_use.join(", ") || "–",
      service.host || "–",
    ];
  });
}

function kv(status) {
  rows(byId("tiers"), status.tiers, (tier) => tier.tier, (tier) => [
    tier.tier === "hbm" ? "workers' pools" : tier.tier,
    bytes(tier.num_bytes),
    tier.capacity_bytes ? bytes(tier.capacity_bytes) : "no limit",
    count(tier.num_blocks),
    share(tier.hit_share),
    `${bytes(tier.read_bytes_per_s)}/s`,
    `${bytes(tier.written_bytes_per_s)}/s`,
  ]);
  rows(byId("flows"), status.flows, (flow) => `${flow.transport} ${flow.traffic_class}`, (flow) => [
    flow.transport, flow.traffic_class, String(flow.dscp), bytes(flow.num_bytes), `${bytes(flow.bytes_per_s)}/s`, count(flow.leases_per_s), share(flow.retransmitted_share, 2),
  ], "nothing has been sent yet");
}

function warnings(found) {
  byId("warnings").hidden = !found.length;
  keep(byId("warning-list"), found, (w) => w.rule + w.message.replace(/[\d.,]+/g, "#"), () => make("li"), (item, warning) => say(item, warning.message));
}

function troubles(found) {
  const list = byId("troubles");
  if (!found.length) return list.replaceChildren(make("li", "quiet", "none"));
  const clock = (at) => new Date(1000 * at).toLocaleTimeString();
  keep(list, found, (t) => `${t.at_unix_s} ${t.service} ${t.message}`, () => make("li"), (item, t) => say(item, `${clock(t.at_unix_s)} ${t.service}: ${t.code}: ${t.message}`));
}

function show(status) {
  const gateway = status.gateway;
  say(byId("model"), status.model);
  document.title = `DistServe ${status.model}`;
  const state = byId("state");
  state.className = `pill s-${gateway.status}`;
  say(state, gateway.status);
  say(byId("reasons"), gateway.reasons.join("; "));
  say(byId("identity"), `${gateway.id}, version ${status.version} ·`);
  say(byId("window"), `of the last ${Math.round(gateway.window_s)} s`);
  byId("try-model").value = status.model;
  byId("key-field").hidden = !gateway.needs_key;
  tiles(gateway);
  history(status.history);
  times(gateway);
  classes(gateway);
  routes(gateway);
  services(status.services);
  kv(status);
  warnings(status.warnings);
  troubles(status.troubles);
}

const link = byId("link");
let pause = EVERY_MS;
let timer = null;

function told(text, isLost) {
  say(link, text);
  link.classList.toggle("lost", isLost);
}

async function look() {
  timer = null;
  if (document.hidden) return;
  try {
    const response = await fetch("status", { signal: AbortSignal.timeout(ANSWER_MS), cache: "no-store" });
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    pause = EVERY_MS;
    told("live", false);
  } catch (error) {
    pause = Math.min(LONGEST_MS, pause * 2);
    told(`no figures (${error.message}): these are old, trying again in ${pause / 1000} s`, true);
  }
  timer ??= setTimeout(look, pause);
}

// Nobody looks at a hidden page: nothing is asked for.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer === null) look();
});
look();
