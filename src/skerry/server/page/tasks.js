"use strict";
// The page for tasks: whoever looks at it says what is to be done and where, and sees what comes of it.
(() => {
  const AGENTS = "/api/v2/agents";
  const LOOK = 5000;
  const LONGEST_LOG = 20000; // pieces, of which each is a line or a few words

  const find = (selector) => document.querySelector(selector);
  const [asking, signing, work, rows] = [find("#new"), find("#sign-in"), find("#work"), find("#list tbody")];
  let word = null; // the session's, against forgery
  let stream = null;
  let timer = 0;

  class Refused extends Error {}

  async function ask(path, method = "GET", body) {
    const headers = { Accept: "application/json" };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (word !== null) headers["X-Skerry-CSRF"] = word;
    const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const said = await answer.json().catch(() => ({}));
    if (answer.ok) return said;
    if (answer.status === 401) showSignIn();
    const { message = `The server answered with ${answer.status}.`, hint } = said.error || {};
    throw new Refused([message, hint].filter(Boolean).join(" "));
  }

  // What goes wrong is said where everybody looks.
  function attempt(action) {
    return async (event) => {
      event?.preventDefault();
      say("");
      try {
        await action(event);
      } catch (error) {
        say(error instanceof Refused ? error.message : "The server cannot be reached.", "error");
      }
    };
  }

  function say(text, kind = "") {
    const state = find("#state");
    state.textContent = text;
    state.dataset.kind = kind;
  }

  function element(name, text, kind) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  // -- who it is ------------------------------------------------------------------------------------------------------

  function showSignIn() {
    word = null;
    clearInterval(timer);
    stream?.close();
    signing.hidden = false;
    work.hidden = find("#leave").hidden = true;
    find("#who").textContent = "";
    rows.replaceChildren();
    find("#one").hidden = true;
  }

  function welcome(me) {
    word = me.csrf ?? null;
    signing.hidden = true;
    work.hidden = false;
    find("#who").textContent = me.email ?? "";
    find("#leave").hidden = !me.email;
  }

  async function begin() {
    welcome(await ask("/v1/auth/me"));
    showProviders(await ask(`${AGENTS}/providers`));
    await list();
    clearInterval(timer);
    timer = setInterval(() => document.hidden || list().catch(() => {}), LOOK);
    show();
  }

  signing.addEventListener("submit", attempt(async () => {
    const { email, password } = Object.fromEntries(new FormData(signing));
    await ask("/v1/auth/sign-in", "POST", { email, password });
    signing.reset();
    await begin();
  }));
  find("#leave").addEventListener("click", attempt(async () => {
    await ask("/v1/auth/sign-out", "POST", {});
    showSignIn();
  }));

  // -- asking ---------------------------------------------------------------------------------------------------------

  function showProviders(providers) {
    const anywhere = { available: true, description: "Where its kind does best, or else at the usual place." };
    const choices = Object.entries({ "": anywhere, ...providers }).map(([name, { available, description, reason }]) => {
      const label = element("label", undefined, available ? "" : "absent");
      const choice = element("input");
      Object.assign(choice, { type: "radio", name: "provider", value: name, checked: name === "", disabled: !available });
      label.append(choice, element("span", name || "anywhere"), element("small", reason || description));
      return label;
    });
    find("#providers").replaceChildren(element("legend", "Where"), ...choices);
  }

  asking.addEventListener("submit", attempt(async () => {
    const button = asking.querySelector("button");
    button.disabled = true;
    try {
      const given = Object.fromEntries([...new FormData(asking)].filter(([, value]) => value.trim() !== ""));
      if (given.config) given.config = parsed(given.config);
      const task = await ask(`${AGENTS}/task`, "POST", { ...given, detach: true });
      asking.elements.message.value = "";
      location.hash = task.taskId;
      await list();
    } finally {
      button.disabled = false;
    }
  }));

  function parsed(text) {
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new Refused(`The configuration is no JSON: ${error.message}.`);
    }
  }

  // -- what there is --------------------------------------------------------------------------------------------------

  async function list() {
    const { tasks } = await ask(`${AGENTS}/tasks?limit=50`);
    find("#list .empty").hidden = tasks.length > 0;
    rows.replaceChildren(...tasks.map((task) => {
      const row = element("tr");
      const link = element("a", task.taskId);
      link.href = `#${task.taskId}`;
      const first = element("td");
      first.append(link);
      const wish = task.message.length > 200 ? `${task.message.slice(0, 200)}…` : task.message;
      row.append(first, element("td", task.status, task.status), element("td", task.provider));
      row.append(element("td", task.changedFiles || ""), element("td", task.cost ? task.cost.toFixed(4) : ""));
      row.append(element("td", wish));
      row.setAttribute("aria-current", String(task.taskId === chosen()));
      return row;
    }));
  }

  const chosen = () => location.hash.slice(1);

  function show() {
    stream?.close();
    stream = null;
    const id = chosen();
    find("#one").hidden = id === "";
    for (const row of rows.children) row.setAttribute("aria-current", String(row.firstChild.textContent === id));
    if (id === "") return;
    find("#one h2").textContent = id;
    for (const place of ["#facts", "#told", "#diff"]) find(place).replaceChildren();
    find("#cancel").hidden = false;
    find("#retry").hidden = find("#patch").hidden = true;
    follow(id);
  }

  // A browser comes back by itself when the connection breaks, and says which event it saw last.
  function follow(id) {
    const mine = (stream = new EventSource(`${AGENTS}/task/${encodeURIComponent(id)}/stream`));
    mine.onopen = () => say("");
    mine.onmessage = ({ data }) => {
      if (stream !== mine) return;
      const event = JSON.parse(data);
      tell(event);
      if (event.task) {
        mine.close();
        end(event.task);
        list().catch(() => {});
      }
    };
    mine.onerror = attempt(async () => {
      if (stream !== mine) return;
      if (mine.readyState !== EventSource.CLOSED) return say("Connection lost. Reconnecting…", "error");
      await ask(`${AGENTS}/task/${encodeURIComponent(id)}`); // says why
    });
  }

  function tell({ type, content, message, event }) {
    const told = find("#told");
    if (type === "chunk") told.append(content);
    else if (type === "tool_call" && event.status === "completed") told.append(element("div", `▸ ${event.tool}: ${work_of(event.args)}`));
    else if (type === "tool_call" && event.status === "error") told.append(element("div", `▸ ${event.tool}: ${event.output ?? "failed"}`, "trouble"));
    else if (type === "warning" || type === "retry" || type === "error") told.append(element("div", message ?? type, "trouble"));
    else if (type === "status") told.append(element("div", message, "note"));
    while (told.childNodes.length > LONGEST_LOG) told.firstChild.remove();
  }

  function work_of(args) {
    const said = args?.command ?? args?.filePath ?? args?.file_path ?? args?.pattern ?? JSON.stringify(args ?? {});
    return String(said).slice(0, 400);
  }

  function end(task) {
    const { input = 0, output = 0 } = task.tokens ?? {};
    const facts = [task.status, task.provider, task.agent, task.model, task.sandboxId];
    facts.push(input + output && `${input + output} tokens`, task.cost && `${task.cost.toFixed(4)} USD`);
    find("#facts").textContent = facts.filter(Boolean).join(" · ");
    find("#cancel").hidden = true;
    find("#retry").hidden = false;
    const { patch = "", error, truncated } = task.diff ?? {};
    if (error) tell({ type: "warning", message: `There is no diff: ${error}` });
    if (truncated) tell({ type: "warning", message: "The patch is larger than what is kept: there are files missing in it." });
    Object.assign(find("#patch"), { hidden: patch === "", href: `${AGENTS}/task/${task.taskId}/diff`, download: `${task.taskId}.patch` });
    find("#diff").replaceChildren(...patch.split("\n").map(coloured));
  }

  function coloured(line) {
    const kind = { "+": "new", "-": "gone", "@": "place" }[line[0]] ?? "";
    return element("span", `${line}\n`, kind);
  }

  find("#cancel").addEventListener("click", attempt(() => ask(`${AGENTS}/task/${encodeURIComponent(chosen())}/cancel`, "POST", {})));
  find("#retry").addEventListener("click", attempt(async () => {
    const again = await ask(`${AGENTS}/task/${encodeURIComponent(chosen())}/retry`, "POST", {});
    location.hash = again.taskId;
    await list();
  }));
  addEventListener("hashchange", show);

  attempt(begin)();
})();
