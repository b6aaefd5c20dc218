"use strict";

const element = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed"];
const POLL_MS = 1000;
const SPARK_POINTS = 60;

let messages = [];
let answering = null; // the answer being streamed: { controller, item, messages }

function headers() {
  const key = element("key").value;
  return key ? { "Content-Type": "application/json", Authorization: `Bearer ${key}` } : { "Content-Type": "application/json" };
}

function restore() {
  const settings = JSON.parse(localStorage.getItem("deltafold.settings") ?? "{}");
  for (const name of SETTINGS) if (name in settings) element(name).value = settings[name];
  element("key").value = sessionStorage.getItem("deltafold.key") ?? "";
  messages = JSON.parse(sessionStorage.getItem("deltafold.messages") ?? "[]");
  for (const message of messages) show(message.role, message.content);
}

function save() {
  const settings = Object.fromEntries(SETTINGS.map((name) => [name, element(name).value]));
  localStorage.setItem("deltafold.settings", JSON.stringify(settings));
  sessionStorage.setItem("deltafold.key", element("key").value);
  sessionStorage.setItem("deltafold.messages", JSON.stringify(messages));
}

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.dataset.label = { user: "You", assistant: "Model", error: "Error" }[role];
  item.textContent = text;
  element("messages").append(item);
  element("empty").hidden = true;
  item.scrollIntoView({ block: "end" });
  return item;
}

function requestBody() {
  const number = (name) => (element(name).value === "" ? undefined : Number(element(name).value));
  const system = element("system").value.trim();
  return JSON.stringify({
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

async function answer(signal, onText) {
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: requestBody(), signal });
  if (!response.ok) throw await failure(response);
  const end = { reason: null, usage: null };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return end;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    end.usage = chunk.usage ?? end.usage;
    const [choice] = chunk.choices;
    if (choice?.delta.content) onText(choice.delta.content);
    end.reason = choice?.finish_reason ?? end.reason;
  }
  throw new Error("the connection ended before the answer did");
}

async function send() {
  const input = element("input");
  const text = input.value;
  if (answering || !text.trim()) return;
  messages.push({ role: "user", content: text });
  show("user", text);
  input.value = "";
  save();
  const item = show("assistant", "");
  item.classList.add("streaming");
  const mine = (answering = { controller: new AbortController(), item, messages });
  setAnswering(true);
  const start = performance.now();
  const list = element("messages");
  try {
    const end = await answer(mine.controller.signal, (delta) => {
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      item.append(delta);
      if (atEnd) list.scrollTop = list.scrollHeight;
    });
    element("status").textContent = summary(end, performance.now() - start);
  } catch (error) {
    if (error.name === "AbortError") element("status").textContent = "Stopped.";
    else show("error", error.message);
  }
  item.classList.remove("streaming");
  keepAnswer();
  answering = null;
  setAnswering(false);
}

function keepAnswer() {
  const { item, messages: asked, isKept } = answering;
  if (isKept) return; // leaving the page keeps it, and then ends the request too
  answering.isKept = true;
  if (!item.textContent) item.remove();
  else if (asked === messages) messages.push({ role: "assistant", content: item.textContent });
  save();
}

function summary({ reason, usage }, milliseconds) {
  const rate = usage ? `${usage.completion_tokens} tokens, ${(usage.completion_tokens / (milliseconds / 1000)).toFixed(1)} a second` : "";
  const why = { length: "cut at the length limit", abort: "ended by the server" }[reason];
  return [rate, why].filter(Boolean).join("; ") + ".";
}

function setAnswering(is) {
  element("send").hidden = is;
  element("stop").hidden = !is;
  if (is) element("status").textContent = "Answering…";
  element("input").focus();
}

function clear() {
  answering?.controller.abort();
  messages = [];
  element("messages").replaceChildren();
  element("empty").hidden = false;
  element("status").textContent = "";
  save();
  element("input").focus();
}

function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const match = /^(deltafold_\w+) (\S+)$/.exec(line);
    if (match) values[match[1]] = Number(match[2]);
  }
  return values;
}

const rates = [];
let lastSample = null;

function showLoad(values) {
  const now = performance.now();
  const tokens = values.deltafold_output_tokens_total;
  if (lastSample) {
    rates.push((tokens - lastSample.tokens) / ((now - lastSample.at) / 1000));
    if (rates.length > SPARK_POINTS) rates.shift();
    element("rate").textContent = rates.at(-1).toFixed(rates.at(-1) < 10 ? 1 : 0);
    const top = Math.max(1, ...rates);
    const points = rates.map((rate, i) => `${SPARK_POINTS - rates.length + i},${(19 - (18 * rate) / top).toFixed(2)}`);
    element("spark").firstElementChild.setAttribute("points", points.join(" "));
  }
  lastSample = { at: now, tokens };
  element("running").textContent = values.deltafold_requests_running;
  element("waiting").textContent = values.deltafold_requests_waiting;
  showPool("blocks", values.deltafold_blocks_used, values.deltafold_blocks_free, values.deltafold_blocks_cached);
  showPool("slots", values.deltafold_state_slots_used, values.deltafold_state_slots_free, values.deltafold_state_slots_cached);
}

function showPool(id, used, free, cached) {
  const total = used + free + cached;
  element(`${id}-text`).textContent = `${used} of ${total}` + (cached ? `, ${cached} cached` : "");
  element(id).max = total;
  element(id).value = used;
}

async function poll() {
  try {
    const response = await fetch("metrics", { headers: headers() });
    if (!response.ok) throw await failure(response);
    showLoad(parseMetrics(await response.text()));
    if (element("model").dataset.known !== "yes") await showModel();
  } catch (error) {
    element("model").textContent = error.message;
    element("model").dataset.known = "no";
  }
  setTimeout(poll, POLL_MS);
}

async function showModel() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  const [model] = (await response.json()).data;
  element("model").textContent = `${model.id}, up to ${model.max_model_len} tokens`;
  element("model").dataset.known = "yes";
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
element("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.controller.abort();
});
element("stop").addEventListener("click", () => answering?.controller.abort());
addEventListener("pagehide", () => answering && keepAnswer()); // a reload keeps what has come so far
element("clear").addEventListener("click", clear);
element("settings").addEventListener("change", save);
restore();
poll();
