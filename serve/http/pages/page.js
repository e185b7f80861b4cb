"use strict";
const at = (id) => document.getElementById(id);
const talk = at("talk"), text = at("text"), send = at("send"), key = at("key"), panels = [at("list"), at("settings")];
const isTouched = matchMedia("(pointer: coarse)").matches, narrow = matchMedia("(max-width: 60rem)");
const NO_KEY = "This server asks for a key. Enter it in the settings, in the field “Key”.";
const WRONG_KEY = "The server does not know this key. Correct it in the settings, in the field “Key”.";
const NOT_KEPT = "This conversation is not kept: the browser's storage is full or switched off. Delete old ones.";
let conversation = newConversation(), running = null, speed = null, described = null, lacksKey = false;
let draft = null;  // the answer that is being written

// ---- the server

function ask(path, body, signal) {
  const headers = key.value ? { authorization: "Bearer " + key.value } : {};
  if (body) headers["content-type"] = "application/json";
  return fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
}

const keyProblem = () => key.value ? WRONG_KEY : NO_KEY;

async function problem(answer) {
  if (answer.status === 401) return keyProblem();
  try { return (await answer.json()).error.message; } catch { return answer.status + " " + answer.statusText; }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

// What a person has entered, undefined where the server's or the model's value holds.
function entered(id) {
  if (at(id).validity.badInput) throw new Error(at(id).parentNode.firstChild.data.trim() + " is not a number");
  return at(id).value.trim() === "" ? undefined : Number(at(id).value);
}

// ---- what is seen

function article(kind, name, ...content) {
  const made = element("article", kind, element("h2", "", name), ...content);
  made.setAttribute("aria-label", name);
  talk.append(made);
  return made;
}

// An answer on the page: thoughts folded, then Markdown. `draw` shows what the message has by now.
function answerArticle(message) {
  const words = element("div", "words"), thoughts = element("div", "plain");
  const folded = element("details", "thoughts", element("summary", "", "Thoughts"), thoughts);
  const made = article("assistant", "Model", folded, words);
  let isAsked = false;
  function draw() {
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
    isAsked = false;
    folded.hidden = !message.reasoning;
    if (thoughts.textContent !== message.reasoning) thoughts.textContent = message.reasoning;
    showMarkdown(words, message.content);
    if (isAtEnd) talk.scrollTop = talk.scrollHeight;
  }
  draw();
  return {
    made, draw,
    soon() { if (!isAsked) { isAsked = true; requestAnimationFrame(draw); } },
  };
}

function fail(words) {
  const made = article("error", "Error", element("div", "plain", words));
  made.setAttribute("role", "alert");
  if (words === NO_KEY || words === WRONG_KEY) {
    const enter = element("button", "", "Enter the key");
    enter.type = "button";
    enter.addEventListener("click", () => { if (narrow.matches) at("settings").showPopover(); key.focus(); });
    made.classList.add("key");
    made.append(enter);
  }
  talk.scrollTop = talk.scrollHeight;
}

function showConversation() {
  talk.replaceChildren();
  for (const message of conversation.messages) {
    if (message.role === "user") article("user", "You", element("div", "plain", message.content));
    else answerArticle(message);
  }
  if (!conversation.messages.length) talk.append(element("p", "empty", "Ask the model something."));
  showEnd();
  talk.scrollTop = talk.scrollHeight;
}

// What stands behind the last message: a button to have it answered anew; and whether `send` stops.
function showEnd() {
  at("again")?.remove();
  send.textContent = running ? "Stop" : "Send";
  if (running || !conversation.messages.length) return;
  const again = element("button", "", "Retry");
  again.id = "again";
  again.type = "button";
  again.addEventListener("click", retry);
  talk.append(again);
}

function showList() {
  at("talks").replaceChildren(...listConversations().map(({ id, title }) => {
    const link = element("a", "", title), remove = element("button", "", "✕");
    link.href = "#" + id;
    link.title = title;
    if (id === conversation.id) link.setAttribute("aria-current", "page");
    remove.type = "button";
    remove.setAttribute("aria-label", "Delete " + title);
    remove.addEventListener("click", () => { if (confirm(`Delete “${title}”?`)) forget(id); });
    return element("li", "", link, remove);
  }));
}

// ---- conversations

// Leave this conversation; an answer that runs is stopped, and what came of it is kept.
function change(next) {
  running?.abort();
  running = null;
  conversation = next;
  showConversation();
  showList();
  if (lacksKey) fail(keyProblem());
  panels[0].hidePopover();
}

function startNew() {
  history.pushState(null, "", location.pathname);
  change(newConversation());
  text.focus();
}

function openLinked() {
  const found = loadConversation(location.hash.slice(1));
  if (!found) history.replaceState(null, "", location.pathname);
  if (!found || found.id !== conversation.id) change(found || newConversation());
}

function forget(id) {
  deleteConversation(id);
  if (id === conversation.id) {
    conversation.isForgotten = true;
    startNew();
  } else showList();
}

function keep(talked) {
  if (talked.isForgotten) return;
  if (!talked.messages.length) deleteConversation(talked.id);
  else if (!saveConversation(talked) && talked === conversation) fail(NOT_KEPT);
  if (talked === conversation) {
    history.replaceState(null, "", talked.messages.length ? "#" + talked.id : location.pathname);
  }
  showList();
}

// ---- answers

// Read an answer into a message as it comes; returns why it did not end well, if so.
async function read(talked, message, signal, changed) {
  const system = at("system").value.trim();
  const given = talked.messages.map(({ role, content }) => ({ role, content }));
  if (system) given.unshift({ role: "system", content: system });
  try {
    const found = await ask("v1/chat/completions", {
      messages: given, stream: true, stream_options: { include_usage: true },
      max_tokens: entered("most"), temperature: entered("temperature"),
    }, signal);
    if (!found.ok) throw new Error(await problem(found));
    for await (const event of events(found)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices && event.choices[0] && event.choices[0].delta || {};
      message.reasoning += delta.reasoning_content || "";
      message.content += delta.content || "";
      if (event.timings) speed = 1e3 * event.timings.predicted_n / event.timings.predicted_ms;
      changed();
    }
    return message.content || message.reasoning ? "" : "The answer is empty.";
  } catch (error) {
    if (error.name === "AbortError") return "";
    return error instanceof TypeError ? "The server cannot be reached: " + error.message : error.message;
  }
}

// Have the last message answered. `before` is the answer that a new one replaces.
async function answer(before) {
  const talked = conversation, own = running = new AbortController();
  const message = { role: "assistant", content: "", reasoning: "" };
  const shown = answerArticle(message);
  shown.made.setAttribute("aria-busy", "true");
  at("said").textContent = "The model answers.";
  showEnd();
  talk.scrollTop = talk.scrollHeight;
  draft = message;
  const why = await read(talked, message, own.signal, shown.soon);
  const isSeen = running === own;
  if (draft === message) draft = null;
  if (message.content || message.reasoning) talked.messages.push(message);
  else if (before) talked.messages.push(before);
  else if (isSeen) takeBack(talked);
  if (isSeen) {
    running = null;
    if (message.content || message.reasoning) shown.draw();
    else showConversation();
    shown.made.removeAttribute("aria-busy");
    showEnd();
    at("said").textContent = why ? "" : "The answer is complete.";
    if (why) fail(why);
  }
  keep(talked);
  refresh();
}

// Put a message that was not answered back into the field, before what is there by now.
function takeBack(talked) {
  const { content } = talked.messages.pop();
  text.value = [content, text.value].filter(Boolean).join("\n");
  if (!talked.messages.length) talked.title = "";
}

function retry() {
  const before = conversation.messages.at(-1).role === "assistant" ? conversation.messages.pop() : null;
  showConversation();
  answer(before);
}

// ---- what a person does

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const words = text.value.trim();
  if (!words) return;
  text.value = "";
  conversation.messages.push({ role: "user", content: words });
  showConversation();
  keep(conversation);
  answer(null);
});
text.placeholder = isTouched ? "Message" : "Message; Enter sends, Shift+Enter makes a line";
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouched) return;
  event.preventDefault();
  if (!running) at("form").requestSubmit();
});
talk.addEventListener("click", (event) => {
  if (event.target.matches(".copy")) copyText(event.target.closest(".code").querySelector("code").textContent, event.target);
});
at("fresh").addEventListener("click", startNew);
addEventListener("hashchange", openLinked);
addEventListener("storage", showList);
narrow.addEventListener("change", () => panels.forEach((panel) => panel.hidePopover()));
for (const id of ["key", "temperature", "most", "system"]) {  // kept in this tab
  try { at(id).value = sessionStorage.getItem(id) || ""; } catch { /* switched off */ }
  at(id).addEventListener("change", () => {
    try { sessionStorage.setItem(id, at(id).value); } catch { /* switched off */ }
  });
}
key.addEventListener("change", () => { lacksKey = false; refresh(); });
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return refresh();
  // the page may not come back
  if (running && draft.content) saveConversation({ ...conversation, messages: [...conversation.messages, draft] });
});

// ---- state

// Show the values that hold where nothing is entered.
async function placeholders() {
  const found = await ask("props");
  if (!found.ok) return;
  const { temperature, n_predict } = (await found.json()).default_generation_settings.params;
  at("temperature").placeholder = Number(temperature.toFixed(4));
  at("most").placeholder = n_predict < 0 ? "all that fit" : n_predict;
}

async function status() {
  const found = await ask("v1/status");
  if (found.status === 401) {
    lacksKey = true;
    at("model").textContent = "key needed";
    if (!talk.querySelector(".key")) fail(keyProblem());
    return {};
  }
  talk.querySelectorAll(".key").forEach((old) => old.remove());
  const state = await found.json();
  at("model").textContent = state.model;
  at("warnings").textContent = (state.warnings || []).join("\n");
  if (state.state === "ready" && described !== state.model) {
    described = state.model;
    await placeholders();
  }
  const rows = { state: state.state, running: `${state.running} of ${state.slots}`, waiting: state.waiting,
    cache: `${(100 * state.kv_cache_usage).toFixed(0)} % of ${state.cache_pages} pages`,
    context: `${state.max_model_len} tokens`, tools: state.tool_format };
  return speed ? { ...rows, "last answer": `${speed.toFixed(0)} tokens/s` } : rows;
}

async function refresh() {
  if (lacksKey || document.hidden) return;
  const rows = await status().catch(() => ({ state: "not reached" }));
  at("status").replaceChildren(...Object.entries(rows).flatMap(
    ([name, value]) => [element("dt", "", name), element("dd", "", String(value))]));
}

change(conversation);
openLinked();
refresh();
setInterval(refresh, 3000);
