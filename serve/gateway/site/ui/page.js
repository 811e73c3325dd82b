// What the page shows, asked of the gateway every two seconds while somebody looks.

import { element, plot, short } from "/ui/plot.js";

const find = (id) => document.getElementById(id);
const LOOK_MS = 2000, SHOWN_S = 300;
let models = [], chosen = null, file = null;
let key = sessionStorage.getItem("key") ?? "";

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  if (answer.status === 401) { askForKey(await answer.json()); throw new Error("no key"); }
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function askForKey(problem) {
  find("key").hidden = false;
  document.querySelector("main").hidden = true;
  find("key-told").textContent = key ? problem.error : "";
}

find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("secret").value.trim();
  sessionStorage.setItem("key", key);
  find("secret").value = "";
  look();
});

async function look() {
  try {
    const [ready, found, history, rollouts, memory] = await Promise.all([
      fetch("/readyz"), get("/ui/models"), get("/ui/history"), get("/rollouts"), get("/ui/memory"),
    ]);
    find("key").hidden = true;
    document.querySelector("main").hidden = false;
    find("health").textContent = ready.ok ? "● ready" : `○ ${(await ready.json()).status}`;
    models = found;
    showModels(history.models);
    showPlots(history.models);
    showRollouts(rollouts);
    showMemory(memory);
  } catch (error) {
    if (error.message !== "no key") find("health").textContent = "○ the gateway does not answer";
  }
}

function tensors(list) {
  return list.map((each) => `${each.name}: ${each.datatype}[${each.shape.join(", ")}]`).join(", ");
}

function showModels(history) {
  const list = find("models");
  const focused = document.activeElement?.dataset?.model;
  list.replaceChildren(...models.map((model) => {
    const ready = model.state === "READY";
    const state = element("span", { class: `state ${ready ? "" : ["ON_DEMAND", "LOADING"].includes(model.state) ? "rests" : "off"}` }, ready ? "ready" : model.state.toLowerCase().replace("_", " "));
    const button = element("button", { type: "button", "data-model": model.name, "aria-pressed": model.name === chosen },
      state, element("strong", {}, model.name));
    if (model.inputs) {
      const now = history[model.name]?.at(-1);
      const rate = now ? ` · ${short(now[1])} requests/s` : "";
      button.append(element("small", {}, `version ${model.versions.join(", ")}${rate}`),
        element("small", {}, tensors(model.inputs)), element("small", {}, `→ ${tensors(model.outputs)}`));
    }
    button.addEventListener("click", () => choose(model.name));
    const item = element("li", {}, button);
    return item;
  }));
  if (focused) list.querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
  if (!models.length) list.replaceChildren(element("li", {}, "No model is loaded, or none that this key may ask."));
  if (!models.some((model) => model.name === chosen)) {
    const first = models.find((model) => model.state === "READY");
    if (first) choose(first.name);
  }
}

function mib(bytes) { return `${Math.round(bytes / 2 ** 20).toLocaleString("en")} MiB`; }

function showMemory(memory) {
  find("memory-section").hidden = !memory;
  if (!memory) return;
  const told = `${mib(memory.bytes)} of ${mib(memory.limit_bytes)}`;
  const bar = element("meter", { min: 0, max: memory.limit_bytes, value: memory.bytes, "aria-label": `memory: ${told}` });
  const rows = [["model", "memory", "loaded", "made way", "failed", "requests that waited"],
    ...memory.models.map((each) => [each.pinned ? `${each.name} (pinned)` : each.name, each.bytes ? mib(each.bytes) : "–",
      each.loaded, each.evicted, each.failed, each.waited])];
  if (memory.other_bytes) rows.push(["others", mib(memory.other_bytes), "", "", "", ""]);
  rows.push(["Triton itself", mib(memory.server_bytes), "", "", "", ""]);
  const scrolled = find("memory").querySelector(".scroll")?.scrollLeft ?? 0;
  const [head, ...body] = rows.map((row, index) =>
    element("tr", {}, ...row.map((cell) => element(index ? "td" : "th", {}, String(cell)))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  find("memory").replaceChildren(element("p", {}, bar, ` ${told}`),
    element("div", { class: "scroll", tabindex: 0 }, table));
  find("memory").querySelector(".scroll").scrollLeft = scrolled;
}

function choose(name) {
  const model = models.find((each) => each.name === name);
  if (!model) return;
  const other = name !== chosen;
  chosen = name;
  for (const button of find("models").querySelectorAll("button"))
    button.setAttribute("aria-pressed", button.dataset.model === name);
  find("send").disabled = model.state !== "READY" && model.state !== "ON_DEMAND";
  find("signature").textContent = model.inputs ? `${name} takes ${tensors(model.inputs)}${model.state === "ON_DEMAND" ? "; it is loaded when it is asked" : ""}` : model.state === "ON_DEMAND" ? `${name} is loaded when it is asked` : `${name} is not ready`;
  find("drop").hidden = !model.file;
  find("values-label").textContent = model.file ? "or JSON values by input name" : "JSON values by input name";
  if (!other) return;
  takeFile(null);
  find("answer").replaceChildren();
  find("values").value = model.example ? pretty(model.example) : "";
}

// JSON whose inner lists of numbers stay on a line.
function pretty(value) {
  return JSON.stringify(value, null, 1).replace(/\[\s+((?:[-\d.eE+]+|null),?\s*)+\]/g, (list) => list.replace(/\s+/g, " "));
}

function takeFile(taken) {
  file = taken;
  const preview = find("preview");
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.hidden = true;
  preview.removeAttribute("src");
  document.querySelector("label[for=file]").textContent =
    file ? `${file.name} (${file.size.toLocaleString("en")} bytes)` : "Choose a file, or drop it here";
  if (file && file.type.startsWith("image/")) {
    preview.src = URL.createObjectURL(file);
    preview.alt = file.name;
    preview.hidden = false;
  }
  if (!file) find("file").value = "";
}

find("file").addEventListener("change", () => takeFile(find("file").files[0] ?? null));
find("values").addEventListener("input", () => takeFile(null));
find("values").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("ask").requestSubmit();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  find("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    find("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files.length) takeFile(event.dataTransfer.files[0]);
  });
}

find("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!chosen) return;
  find("send").disabled = true;
  try {
    const body = file ?? find("values").value;
    const type = file ? "application/octet-stream" : "application/json";
    const begun = performance.now();
    const answer = await fetch(`/predict/${encodeURIComponent(chosen)}`,
      { method: "POST", body, headers: headers({ "Content-Type": type }) });
    const text = await answer.text();
    show(answer, text, performance.now() - begun);
  } catch (error) {
    find("answer").replaceChildren(element("p", { class: "failed" }, `The gateway does not answer: ${error.message}`));
  } finally {
    find("send").disabled = false;
  }
});

function show(answer, text, ms) {
  let content = text;
  try { content = JSON.parse(text); } catch { /* shown as it came */ }
  const by = answer.headers.get("served-by");
  const told = answer.ok ? `answered in ${ms.toFixed(1)} ms${by ? ` by ${by}` : ""}` : `refused (${answer.status})`;
  find("answer").replaceChildren(
    element("p", answer.ok ? {} : { class: "failed" }, told),
    element("pre", { tabindex: 0 }, typeof content === "string" ? content : pretty(content)));
}

function showPlots(history) {
  const shown = Object.entries(history).filter(([, points]) => points.some((point) => point[1] > 0));
  find("live-none").hidden = shown.length > 0;
  find("plots").replaceChildren(...shown.flatMap(([name, points]) => {
    const times = points.map((point) => point[0]);
    const column = (index) => points.map((point) => point[index]);
    return [
      plot(`${name}: throughput`, "/s", times,
        [{ name: "requests", values: column(1) }, { name: "not answered", values: column(2) }], SHOWN_S),
      plot(`${name}: latency (from buckets)`, "ms", times,
        [["p50", 3], ["p95", 4], ["p99", 5]].map(([label, index]) => ({ name: label, values: column(index) })), SHOWN_S),
    ];
  }));
}

function percent(value) { return `${Number(value.toPrecision(3))}%`; }

function showRollouts(rollouts) {
  find("rollouts-section").hidden = !rollouts.length;
  const scrolled = [...find("rollouts").querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  find("rollouts").replaceChildren(...rollouts.map((rollout) => {
    const title = element("h3", {}, `${rollout.model}: ${rollout.baseline ?? "what is served"} → ${rollout.candidate}`);
    const names = [...rollout.steps.map((step) => step ? percent(step) : "copies"), "all"];
    const at = rollout.state === "promoted" ? names.length - 1 : rollout.step;
    const steps = element("ol", { class: "steps" }, ...names.map((name, index) => {
      const now = index === at && rollout.state !== "waiting";
      const kind = now ? (rollout.state === "aborted" ? "lost" : "now") : index < at ? "done" : "";
      return element("li", now ? { class: kind, "aria-current": "step" } : { class: kind }, name);
    }));
    const told = element("p", { class: "hint" }, `${rollout.state}: ${percent(rollout.weight)} of the requests are `
      + `answered by ${rollout.candidate}${rollout.why ? ` · ${rollout.state === "running" ? "to this step: " : ""}${rollout.why}` : ""}`);
    const parts = [title, steps, told];
    if (rollout.agreement) parts.push(element("p", { class: "hint" }, rollout.agreement));
    if (Object.keys(rollout.evidence).length) parts.push(evidence(rollout.evidence, rollout.state === "running"));
    return element("article", {}, ...parts);
  }));
  find("rollouts").querySelectorAll(".scroll").forEach((each, index) => { each.scrollLeft = scrolled[index] ?? 0; });
}

function seen(name, value) {
  if (value === null) return "";
  return name === "latency" ? `${short(1000 * value)} ms` : percent(100 * value);
}

const ASKED = {
  errors: "does it fail more often?", latency: "is it slower?", slowest: "are more of its answers slow?",
  feedback: "is it reported wrong more often?", disagreement: "does it answer otherwise?",
};

function evidence(found, running) {
  const head = ["question", "observed", "candidate", "baseline", "allowed", "proof of no", "evidence of yes"];
  const rows = Object.entries(found).map(([name, each]) => {
    const bar = (value, label) => element("meter",
      { min: 0, max: 1, value: Math.min(1, value), "aria-label": `${label} ${percent(100 * Math.min(1, value))}` });
    const proof = each.required ? bar(each.proof, "proof of no") : "not asked for";
    const cells = [each.keys === 1 ? `${ASKED[name]} (one key says)` : ASKED[name], each.count,
      each.not_compared ? "not compared" : seen(name, each.candidate), seen(name, each.baseline),
      `${percent(100 * each.bound)}${name === "disagreement" ? "" : " more"}`, proof,
      each.judged === false ? "not judged" : bar(each.alarm, "evidence of yes")];
    return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
  });
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...head.map((name) => element("th", {}, name)))),
    element("tbody", {}, ...rows));
  const waits = Object.entries(found).filter(([, each]) => running && each.waits)
    .map(([name, each]) => element("p", { class: "hint" }, `${name}: ${each.waits}`));
  return element("div", {}, element("div", { class: "scroll", tabindex: 0 }, table), ...waits);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
look();
