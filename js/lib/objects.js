// What Cloudflare's platform gives a Durable Object, for one that lives in this process: a name, a place to keep things
// for as long as the process lasts, and a container, which is a sandbox of Skerry.
import { createHash } from "node:crypto";
import { UnsupportedInNodeError } from "./errors.js";

const FITS = /^[a-z0-9](?:[a-z0-9_-]*[a-z0-9_])?$/;
const LONGEST = 63;
const RESERVED = new Set(["www", "api", "admin", "root", "system", "cloudflare", "workers"]);

/** The id of the sandbox that a name means: the name itself where it can be one, else one that no other name has.
 * Names that the SDK refuses stay as they are, for it to say so. */
export function sandboxId(name) {
  if (FITS.test(name) || RESERVED.has(name.toLowerCase())) return name;
  if (name.length < 1 || name.length > LONGEST || name.startsWith("-") || name.endsWith("-")) return name;
  const mark = createHash("sha256").update(name).digest("hex").slice(0, 16);
  const readable = name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "");
  return `${readable.slice(0, LONGEST - 17).replace(/-+$/, "") || "x"}-${mark}`;
}

class Storage {
  #kept = new Map();
  sql = { exec: () => [] };
  kv = {
    get: (key) => this.#kept.get(key),
    put: (key, value) => void this.#kept.set(key, value),
    delete: (key) => this.#kept.delete(key),
  };

  async get(keys) {
    if (!Array.isArray(keys)) return structuredClone(this.#kept.get(keys));
    return new Map(keys.filter((key) => this.#kept.has(key)).map((key) => [key, structuredClone(this.#kept.get(key))]));
  }

  async put(key, value) {
    const entries = typeof key === "string" ? [[key, value]] : Object.entries(key);
    for (const [name, one] of entries) this.#kept.set(name, structuredClone(one));
  }

  async delete(keys) {
    if (!Array.isArray(keys)) return this.#kept.delete(keys);
    return keys.filter((key) => this.#kept.delete(key)).length;
  }

  async deleteAll() {
    this.#kept.clear();
  }

  async list({ prefix = "" } = {}) {
    return new Map([...this.#kept].filter(([key]) => key.startsWith(prefix)).sort());
  }

  async transaction(work) {
    return work(this);
  }

  async getAlarm() {
    return null;
  }

  // The server itself puts idle sandboxes to sleep, so nothing here has to wake up for it.
  async setAlarm() {}
  async deleteAlarm() {}
  async sync() {}
}

class Container {
  running = true;

  start() {}

  monitor() {
    return new Promise(() => {});
  }

  signal() {}

  async destroy() {}

  getTcpPort() {
    throw new UnsupportedInNodeError("getTcpPort()", "use containerFetch(request, port).");
  }
}

export class ObjectState {
  storage = new Storage();
  container = new Container();
  exports = {};
  props = {};
  #settled = Promise.resolve();

  constructor(name) {
    const id = sandboxId(name);
    this.id = { name, toString: () => id, equals: (other) => String(other) === id };
  }

  /** Everything that has to be done before the object can be used. */
  settled() {
    return this.#settled;
  }

  blockConcurrencyWhile(work) {
    const done = work();
    this.#settled = Promise.all([this.#settled, done]).then(() => {});
    return done;
  }

  waitUntil(work) {
    Promise.resolve(work).catch(() => {});
  }

  abort(reason) {
    throw new Error(reason ?? "The object was told to abort.");
  }
}
