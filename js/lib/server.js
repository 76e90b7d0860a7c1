// A Skerry server, as one sandbox's requests reach it.
import http from "node:http";
import https from "node:https";
import { Readable } from "node:stream";
import { SkerryError } from "./errors.js";
import { connect } from "./socket.js";

// Node's fetch gives up on an answer after five minutes, and a command may take longer: so this is not fetch.
// A kept connection is given up before the server gives it up, which would lose the request that is just on its way.
const kept = { keepAlive: true, timeout: 4000 };
const agents = { "http:": new http.Agent(kept), "https:": new https.Agent(kept) };
// Said anew on this hop, or between the SDK and the platform only.
const NOT_PASSED_ON = new Set([
  "host",
  "connection",
  "content-length",
  "keep-alive",
  "transfer-encoding",
  "upgrade",
  "expect",
  "cf-container-target-port",
  "x-api-key",
]);
const EMPTY = new Set([204, 205, 304]);

export class Server {
  #base;
  #key;

  constructor(url, key) {
    const base = new URL(url);
    if (!(base.protocol in agents)) throw new TypeError(`The address of a server begins with http:// or https://: ${base.protocol}`);
    if (base.username || base.password) throw new TypeError("A key in an address ends up in logs: give it as apiKey, or in SKERRY_API_KEY.");
    this.#base = base.href.replace(/\/+$/, "");
    this.#key = key;
  }

  get wantsKey() {
    return Boolean(this.#key);
  }

  /** Any request, streamed both ways. Redirects are the caller's to follow. */
  async send(path, { method = "GET", headers, body, signal } = {}) {
    const url = new URL(this.#base + path);
    const passed = this.#headers(headers);
    const content = await sendable(body, passed);
    const { request } = url.protocol === "https:" ? https : http;
    return new Promise((resolve, reject) => {
      const asked = request(url, { method, headers: passed, agent: agents[url.protocol], signal }, (answer) => {
        const said = new Headers();
        for (const [name, values] of Object.entries(answer.headersDistinct)) for (const value of values) said.append(name, value);
        const empty = EMPTY.has(answer.statusCode) || method === "HEAD";
        if (empty) answer.resume();
        const stream = empty ? null : Readable.toWeb(answer);
        resolve(new Response(stream, { status: answer.statusCode, statusText: answer.statusMessage, headers: said }));
      });
      asked.on("error", (error) => reject(signal?.aborted ? error : this.#unreachable(error)));
      if (content instanceof Readable) content.on("error", (error) => asked.destroy(error)).pipe(asked);
      else asked.end(content);
    });
  }

  #unreachable(cause) {
    const message = `No server of Skerry answers at ${this.#base}: ${cause.message || cause.code}.`;
    const error = new SkerryError(0, { code: "unreachable", message, hint: "Start one with `skerry serve`, or say where it is (SKERRY_URL)." });
    error.cause = cause;
    return error;
  }

  /** A call of the server's own API: what it answers, or an error. */
  async call(method, path, body) {
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    const answer = await this.send(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    const text = await answer.text();
    let said = {};
    try {
      said = text ? JSON.parse(text) : {};
    } catch {
      said = { error: { message: `The server answered ${answer.status}, and not in JSON.` } };
    }
    if (!answer.ok) throw new SkerryError(answer.status, said.error ?? { message: said.message ?? said.detail });
    return said;
  }

  /** A WebSocket, as it is handed over by `fetch` in a Worker. */
  async connect(path, headers, signal) {
    const passed = this.#headers(headers);
    const offered = passed["sec-websocket-protocol"];
    for (const name of Object.keys(passed)) if (name.startsWith("sec-websocket")) delete passed[name];
    const protocols = offered ? offered.split(",").map((one) => one.trim()) : [];
    return connect(this.#base.replace(/^http/, "ws") + path, passed, protocols, signal);
  }

  /** Ties a connection that asks for another protocol to one of the server's. */
  upgrade(path, { method, headers }, socket, head) {
    const url = new URL(this.#base + path);
    const passed = { ...headers, host: url.host };
    if (this.#key) passed["x-api-key"] = this.#key;
    const { request } = url.protocol === "https:" ? https : http;
    const asked = request(url, { method, headers: passed });
    asked.on("upgrade", (answer, other, rest) => {
      socket.write(`HTTP/1.1 101 Switching Protocols\r\n${lines(answer.rawHeaders)}\r\n`);
      socket.write(rest);
      other.write(head);
      tie(socket, other);
      tie(other, socket);
    });
    asked.on("response", (answer) => {
      socket.write(`HTTP/1.1 ${answer.statusCode} ${answer.statusMessage}\r\nconnection: close\r\n\r\n`);
      answer.pipe(socket);
    });
    asked.on("error", () => socket.destroy());
    asked.end();
  }

  #headers(given) {
    const passed = {};
    for (const [name, value] of new Headers(given)) if (!NOT_PASSED_ON.has(name)) passed[name] = value;
    // Not as Authorization: that one belongs to the app inside.
    if (this.#key) passed["x-api-key"] = this.#key;
    return passed;
  }
}

async function sendable(body, headers) {
  if (body === undefined || body === null) return undefined;
  if (typeof body === "string" || body instanceof Uint8Array) return body;
  if (body instanceof ReadableStream) return Readable.fromWeb(body);
  // Forms, parameters, blobs: Response knows what they are called.
  const made = new Response(body);
  const type = made.headers.get("content-type");
  if (type && !headers["content-type"]) headers["content-type"] = type;
  return Readable.fromWeb(made.body);
}

function lines(raw) {
  let all = "";
  for (let at = 0; at < raw.length; at += 2) all += `${raw[at]}: ${raw[at + 1]}\r\n`;
  return all;
}

function tie(one, other) {
  one.pipe(other);
  one.on("error", () => other.destroy());
  one.on("close", () => other.destroy());
}
