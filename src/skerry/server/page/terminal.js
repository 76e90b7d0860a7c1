"use strict";
// The terminal page: an xterm.js on a WebSocket that comes back by itself.
(() => {
  const FIRST_PAUSE = 300;
  const LONGEST_PAUSE = 10000;
  const GOING_AWAY = 1001;

  const sandbox = document.querySelector('meta[name="skerry-sandbox"]').content;
  const state = document.getElementById("state");
  const query = new URLSearchParams(location.search);
  const encoder = new TextEncoder();

  let ticket = document.querySelector('meta[name="skerry-ticket"]').content;
  let socket = null;
  let pause = FIRST_PAUSE;
  let timer = 0;
  let outcome = null; // how it ended, when coming back by ourselves would be wrong

  const terminal = new Terminal({
    allowProposedApi: true, // for the widths of newer characters
    cursorBlink: true,
    fontFamily: 'ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", Consolas, monospace',
    fontSize: 14,
    macOptionIsMeta: true,
    scrollback: 10000,
    theme: { background: "#11151c", foreground: "#d8dee9", cursor: "#d8dee9", selectionBackground: "#3b4b66" },
  });
  const fit = new FitAddon.FitAddon();
  terminal.loadAddon(fit);
  terminal.loadAddon(new Unicode11Addon.Unicode11Addon());
  terminal.unicode.activeVersion = "11";
  terminal.open(document.getElementById("terminal"));
  fit.fit();
  terminal.focus();

  // A ticket is used up by now, and has no business in the history.
  query.delete("ticket");
  remember();

  function remember() {
    const rest = query.toString();
    history.replaceState(null, "", location.pathname + (rest ? "?" + rest : ""));
  }

  function show(name, text) {
    state.dataset.state = name;
    state.textContent = text;
  }

  function send(data) {
    if (socket !== null && socket.readyState === WebSocket.OPEN) socket.send(data);
  }

  function connect() {
    clearTimeout(timer);
    outcome = null;
    const address = new URL(location.pathname, location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    const wanted = new URLSearchParams(query);
    wanted.set("cols", terminal.cols);
    wanted.set("rows", terminal.rows);
    if (ticket) wanted.set("ticket", ticket);
    address.search = wanted.toString();
    socket = new WebSocket(address, ["skerry.terminal"]);
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => {
      if (typeof data === "string") hear(JSON.parse(data));
      else terminal.write(new Uint8Array(data));
    };
    socket.onclose = ({ code }) => leave(code);
  }

  function hear(message) {
    if (message.type === "ready") {
      // The scrollback follows, and stands for all that was shown before.
      terminal.reset();
      adopt(message);
      pause = FIRST_PAUSE;
      if (message.ticket) ticket = message.ticket;
      query.set("terminal", message.terminal);
      remember();
      show("connected", "Connected");
    } else if (message.type === "resize") {
      adopt(message);
    } else if (message.type === "scrollback") {
      terminal.reset();
    } else if (message.type === "exit") {
      outcome = { state: "ended", text: `The shell ended with code ${message.code}. Press Enter for a new one.` };
    } else if (message.type === "error") {
      outcome = { state: "ended", text: [message.message, message.hint, "Press Enter to try again."].join(" ") };
    }
  }

  function adopt({ cols, rows }) {
    if (cols !== terminal.cols || rows !== terminal.rows) terminal.resize(cols, rows);
  }

  function leave(code) {
    socket = null;
    if (code === 4401 || code === 4403) {
      show("refused", "The server let this page in no longer. Open the terminal anew.");
    } else if (outcome !== null && code !== GOING_AWAY) {
      // The next one will be another terminal: this one's shell is gone.
      query.delete("terminal");
      remember();
      show(outcome.state, outcome.text);
    } else {
      show("lost", "Connection lost. Reconnecting…");
      timer = setTimeout(connect, pause * (0.75 + Math.random() / 2));
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    }
  }

  function refit() {
    const wanted = fit.proposeDimensions();
    if (!wanted || !(wanted.cols > 0) || !(wanted.rows > 0)) return;
    if (wanted.cols === terminal.cols && wanted.rows === terminal.rows) return;
    terminal.resize(wanted.cols, wanted.rows);
    send(JSON.stringify({ type: "resize", cols: wanted.cols, rows: wanted.rows }));
  }

  terminal.onData((data) => {
    if (socket === null && outcome !== null) {
      if (data === "\r") connect();
      return;
    }
    send(encoder.encode(data));
  });
  terminal.onBinary((data) => send(Uint8Array.from(data, (character) => character.charCodeAt(0))));
  terminal.onTitleChange((title) => {
    document.title = title ? `${title} · ${sandbox}` : sandbox;
  });
  terminal.attachCustomKeyEventHandler((event) => {
    // Ctrl-C belongs to the program inside, so copying is Ctrl-Shift-C, as in other terminals.
    if (event.ctrlKey && event.shiftKey && event.code === "KeyC" && terminal.hasSelection()) {
      if (event.type === "keydown" && navigator.clipboard) navigator.clipboard.writeText(terminal.getSelection());
      event.preventDefault();
      return false;
    }
    return true;
  });
  new ResizeObserver(refit).observe(document.getElementById("terminal"));
  // Others may look at the same terminal in windows of other sizes; the one that is used decides.
  window.addEventListener("focus", refit);
  window.addEventListener("online", () => {
    if (socket === null && outcome === null) connect();
  });
  window.skerry = { terminal }; // for tests, and for the curious

  connect();
})();
